package main

import (
	"errors"
	"os"
	"path/filepath"
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

// writeNew makes a file for the user alone, which isn't there yet. It has its name only when it is complete.
func writeNew(name string, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*") // 0600
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Sync(), f.Close()); err == nil {
		err = putInPlace(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // the error is the one before
	}
	return err
}
