package media

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
)

// epoch is the time of all files in a medium, so that two builds are the same. FAT has none before 1980.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

const (
	fatMin   = 34 << 20 // bytes: a FAT32 has at least 65525 clusters
	fatExtra = 2 << 20  // for its tables
)

// makeFAT makes a file with a FAT32 file system for these files. They lie one after the other, without gaps.
func makeFAT(to, label string, files []fatFile) error {
	size := int64(fatExtra)
	for _, f := range files {
		size += int64(len(f.content)) * 33 / 32 // an entry of 4 bytes in each of two tables, for a cluster of 512
	}
	size = (max(size, fatMin) + 1<<20 - 1) >> 20 << 20
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(size); err != nil {
		return err
	}
	return errors.Join(writeFAT(out, 0, size, label, files), out.Close())
}

// writeFAT makes a FAT32 file system in a part of a file, which UEFI boots from.
func writeFAT(out *os.File, start, size int64, label string, files []fatFile) error {
	// The library takes the time of all entries from this variable
	// (https://reproducible-builds.org/specs/source-date-epoch/).
	if err := os.Setenv("SOURCE_DATE_EPOCH", strconv.FormatInt(epoch.Unix(), 10)); err != nil {
		return err
	}
	fs, err := fat32.Create(file.New(out, false), size, start, 512, label, true)
	if err != nil {
		return fmt.Errorf("FAT32 of %d bytes: %w", size, err)
	}
	for _, f := range files {
		if dir := path.Dir(f.path); dir != "/" {
			if err := fs.Mkdir(dir); err != nil {
				return fmt.Errorf("%s: %w", dir, err)
			}
		}
		w, err := fs.OpenFile(f.path, os.O_CREATE|os.O_RDWR)
		if err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		if _, err := w.Write(f.content); err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		if err := w.Close(); err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
	}
	return fs.Close()
}

// A fatFile is a file with its absolute path.
type fatFile struct {
	path    string
	content []byte
}
