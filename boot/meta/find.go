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

// Find is the device of the machine's partition: the one named META that has Garboard's values. Partitions of another
// system may have that name, too. sys is /sys/class/block, and dev /dev. The error is ErrEmpty if there is none.
func Find(sys, dev string) (string, error) {
	partitions, err := filepath.Glob(filepath.Join(sys, "*", "uevent"))
	if err != nil {
		return "", err
	}
	err = ErrEmpty
	for _, at := range partitions {
		if !named(at, Label) {
			continue
		}
		path := filepath.Join(dev, filepath.Base(filepath.Dir(at)))
		unread := open(path, func(device Device, size int64) error { _, err := load(device, size); return err })
		if unread == nil {
			return path, nil
		}
		if !errors.Is(unread, ErrEmpty) {
			err = unread
		}
	}
	return "", err
}

// named reports whether a partition has the label (the kernel's uevent file: PARTNAME=META).
func named(uevent, label string) bool {
	text, _ := os.ReadFile(uevent) // it may be gone
	return slices.Contains(strings.Split(string(text), "\n"), "PARTNAME="+label)
}
