package meta

import (
	"errors"
	"os"
	"path/filepath"
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
		name := named(path, Label)
		if name == "" {
			continue
		}
		s, f, found := OpenFile(filepath.Join(dev, name))
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

// named is the device of a partition if it has the label (the kernel's uevent
// file: PARTNAME=META, DEVNAME=vda4).
func named(uevent, label string) (device string) {
	text, err := os.ReadFile(uevent)
	if err != nil {
		return "" // it is gone
	}
	is := false
	for line := range strings.Lines(string(text)) {
		switch key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "="); key {
		case "PARTNAME":
			is = value == label
		case "DEVNAME":
			device = filepath.Base(value)
		}
	}
	if !is {
		return ""
	}
	return device
}
