package cache

import (
	"errors"
	"os"
)

const exclusive, shared = 0, 1

// flock refuses: the parts are built from packages of Debian, by its tools.
func flock(*os.File, int) (bool, error) {
	return false, errors.New("Garboard isn't built on Windows: build it on Linux")
}
