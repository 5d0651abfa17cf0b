package meta

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Label is the name of the partition.
const Label = "META"

// Find opens the store of the machine: the partition named META that has Garboard's
// values. Partitions of another system may have that name, too. sys is /sys/class/block,
// and dev /dev. The error is ErrEmpty if there is none; the caller closes the file.
func Find(sys, dev string) (*Store, *os.File, error) {
	partitions, err := filepath.Glob(filepath.Join(sys, "*", "uevent"))
	if err != nil {
		return nil, nil, err
	}
	err = ErrEmpty
	for _, path := range partitions {
		if !named(path, Label) {
			continue
		}
		s, f, found := OpenFile(filepath.Join(dev, filepath.Base(filepath.Dir(path))))
		if found == nil {
			return s, f, nil
		}
		if f != nil {
			f.Close()
		}
		if !errors.Is(found, ErrEmpty) {
			err = found
		}
	}
	return nil, nil, err
}

// named reports whether a partition has the label (the kernel's uevent file: PARTNAME=META).
func named(uevent, label string) bool {
	text, _ := os.ReadFile(uevent) // it may be gone
	return slices.Contains(strings.Split(string(text), "\n"), "PARTNAME="+label)
}
