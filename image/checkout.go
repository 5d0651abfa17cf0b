package image

import (
	"fmt"
	"os"
	"path/filepath"
)

// Checkout returns the checkout that contains dir.
func Checkout(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "image", "components")); err == nil {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("%s isn't inside a checkout of Garboard", dir)
		}
	}
}
