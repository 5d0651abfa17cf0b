package main

import (
	"errors"
	"os"
)

// putInPlace gives a file that is whole its name, unless that is taken: then the error is
// fs.ErrExist. The name is claimed first: a rename replaces what is there, and a link,
// which wouldn't, is nothing that FAT and some network file systems have.
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
