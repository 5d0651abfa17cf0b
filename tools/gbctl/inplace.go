package main

import (
	"errors"
	"os"
)

// putInPlace renames a complete file to its final name. If the name is taken, the error
// is fs.ErrExist. The name is reserved first, because a rename replaces an existing file.
// A hard link wouldn't, but FAT and some network file systems don't have them.
func putInPlace(file, name string) error {
	claim, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(claim.Close(), os.Rename(file, name)); err != nil {
		return errors.Join(err, os.Remove(name))
	}
	return nil
}
