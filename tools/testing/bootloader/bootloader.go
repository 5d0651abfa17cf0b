// Package bootloader is a model of what systemd-boot and GRUB do with the EFI system partition of an installed machine
// (boot/esp), for tests that boot nothing.
package bootloader

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

const (
	entriesDir  = "loader/entries"
	environment = "garboard/grubenv"
)

// Start is what a boot loader starts. The zero value is nothing.
type Start struct {
	System string // the file of the system in the partition
	Line   string // the kernel's command line
	Entry  string // of systemd-boot, as it calls it in its variable
	// Count is what the boot loader does before, with the partition in a directory: it counts the boot of a system on
	// trial.
	Count func(dir string) error
}

var (
	entryName = regexp.MustCompile(`^(garboard-[ab](?:-[a-z]+)?)(?:\+(\d+)(?:-(\d+))?)?\.conf$`)
	entryLine = regexp.MustCompile(`(?m)^(version|efi|options) (.+)$`)
	grubLinux = regexp.MustCompile(`(?m)^linux (\(system\)\S+ .*)$`)
)

// SystemdBoot starts the entry with the highest version among those that have a try left or don't count, and else among
// the others (systemd-boot(7), Automatic Boot Assessment).
func SystemdBoot(files fs.FS) (start Start, err error) {
	entries, err := fs.ReadDir(files, entriesDir)
	if err != nil {
		return start, err
	}
	best := -1
	for _, e := range entries {
		name := entryName.FindStringSubmatch(strings.ToLower(e.Name()))
		if name == nil {
			continue // the file that becomes one
		}
		text, err := fs.ReadFile(files, entriesDir+"/"+e.Name())
		if err != nil {
			continue // systemd-boot leaves it out, too
		}
		values := map[string]string{}
		for _, m := range entryLine.FindAllStringSubmatch(string(text), -1) {
			values[m[1]] = m[2]
		}
		rank, err := strconv.Atoi(values["version"])
		if err != nil {
			return start, fmt.Errorf("%s has no version: %q", e.Name(), text)
		}
		if name[2] != "0" {
			rank += 10
		}
		if rank > best {
			best = rank
			start = Start{strings.TrimPrefix(values["efi"], "/"), values["options"], name[1] + ".conf", func(dir string) error { return countEntry(dir, e.Name(), name) }}
		}
	}
	return start, nil
}

// countEntry takes a try from an entry that counts: garboard-b+1.conf becomes garboard-b+0-1.conf.
func countEntry(dir, file string, name []string) error {
	left, _ := strconv.Atoi(name[2]) // "": it doesn't count
	if left == 0 {
		return nil
	}
	failed, _ := strconv.Atoi(name[3]) // "": none
	return os.Rename(filepath.Join(dir, entriesDir, file), filepath.Join(dir, entriesDir, fmt.Sprintf("%s+%d-%d.conf", name[1], left-1, failed+1)))
}

// GRUB follows the script of package esp: the system on trial, the chosen one, and any that is there.
func GRUB(files fs.FS) (start Start, err error) {
	if _, err := fs.ReadFile(files, "garboard/grub.cfg"); err != nil {
		return start, err
	}
	block, _ := fs.ReadFile(files, environment) // GRUB goes on without it
	var slots []string
	for _, name := range []string{"trying", "choice"} {
		_, rest, _ := strings.Cut(string(block), "\n"+name+"=")
		slot, _, _ := strings.Cut(rest, "\n")
		slots = append(slots, slot)
	}
	trying := slots[0]
	for _, slot := range append(slots, boot.SlotNames[:]...) {
		if slot == "" {
			continue
		}
		script, err := fs.ReadFile(files, "garboard/"+slot+".cfg")
		if err != nil {
			continue
		}
		start.System = "EFI/garboard/" + slot + ".efi"
		if linux := grubLinux.FindSubmatch(script); linux != nil {
			start.Line = "BOOT_IMAGE=" + string(linux[1]) // as GRUB passes it on
		}
		start.Count = func(dir string) error {
			if trying == "" {
				return nil
			}
			return saveEnvironment(filepath.Join(dir, environment), block, trying)
		}
		return start, nil
	}
	return start, nil
}

// saveEnvironment does what GRUB's save_env does: it writes to the blocks that the file has.
func saveEnvironment(path string, block []byte, trying string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	saved := bytes.Replace(block, []byte("\ntrying="+trying+"\n"), []byte("\ntrying=\n"), 1)
	_, err = f.WriteAt(append(saved, bytes.Repeat([]byte("#"), len(block)-len(saved))...), 0)
	return errors.Join(err, f.Sync(), f.Close())
}
