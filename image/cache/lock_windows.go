package cache

import (
	"errors"
	"os"
)

// flock refuses: the parts are built from packages of Debian, by its tools.
func flock(*os.File) (bool, error) {
	return false, errors.New("Garboard isn't built on Windows: build it on Linux")
}
