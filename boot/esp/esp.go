// Package esp is the content of the EFI system partition of an installed machine: the systems in slot A and slot B, and
// what the boot loaders need to start one of them.
//
//	EFI/BOOT/BOOTX64.EFI                        systemd-boot, where every UEFI looks
//	EFI/garboard/A.efi, B.efi                   the systems, as unified kernel images
//	loader/loader.conf, loader/entries/*.conf   for systemd-boot (UAPI.1, "Boot Loader Specification")
//	garboard/grub.cfg, A.cfg, B.cfg, grubenv    for GRUB, which a BIOS starts from the same disk
//
// Both loaders start the same files, and both are always there: a disk boots in another machine, too. What they start
// follows from boot.Slots. A system that is trying is started once: systemd-boot counts that in the name of its entry
// (Automatic Boot Assessment), and GRUB in its environment block. After that, the good one is started again, until the
// trying one is good.
//
// A system that is signed for Secure Boot has its own command line, and its entry has no other: the stub would drop it,
// and systemd-boot would measure it. Such a system finds its slot, and that it is trying, in the name of its entry,
// which systemd-boot leaves in a variable of the firmware (Selected).
package esp

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// Names in the partition.
const (
	removable   = "EFI/BOOT/BOOTX64.EFI" // UEFI 2.10, 3.5.1.1
	systemsDir  = "EFI/garboard"
	entriesDir  = "loader/entries"
	loaderConf  = "loader/loader.conf"
	grubDir     = "garboard"
	grubConf    = "grub.cfg"
	environment = "grubenv"

	entryPrefix = "garboard-"
	// once is the kind of a trial after which a good system runs. The others are the values of boot.ParamTrial.
	once        = "trial"
	entrySuffix = ".conf"

	fileMode = 0o644
)

// LoaderDir has the boot loaders on a node, in its root filesystem. The names are those of the files in it.
const (
	LoaderDir   = "/usr/lib/garboard/loader"
	SystemdBoot = "systemd-bootx64.efi"
	GRUBRecord  = "grub-record.img"
	GRUBProgram = "grub-program.img"
)

// Partition is the directory where the partition is mounted.
type Partition string

func (p Partition) path(parts ...string) string {
	return filepath.Join(append([]string{string(p)}, parts...)...)
}

// System is the file of the system in a slot.
func (p Partition) System(slot string) string { return p.path(systemsDir, slot+".efi") }

func (p Partition) directories() error {
	for _, dir := range []string{filepath.Dir(removable), systemsDir, entriesDir, grubDir} {
		if err := os.MkdirAll(p.path(dir), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// Direct reports whether a UEFI starts a system from here without a boot loader. So do media, and no installed machine.
func (p Partition) Direct() bool {
	_, err := readImageFile(p.path(removable))
	return err == nil
}

// Loaders writes the boot loaders, unless they are there.
func (p Partition) Loaders(systemdBoot []byte) error {
	if err := p.directories(); err != nil {
		return err
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{
		{removable, systemdBoot},
		{loaderConf, []byte("timeout 0\neditor no\n")},
		{filepath.Join(grubDir, grubConf), []byte(grubScript)},
	} {
		if err := p.put(f.content, f.name); err != nil {
			return err
		}
	}
	return nil
}

// put writes a file if it has another content.
func (p Partition) put(content []byte, parts ...string) error {
	path := p.path(parts...)
	if have, err := os.ReadFile(path); err == nil && string(have) == string(content) {
		return nil
	}
	return boot.WriteFile(path, content, fileMode)
}

// Check reads the headers of the system in a slot, as far as a boot loader needs them.
func (p Partition) Check(slot string) error {
	_, err := readImageFile(p.System(slot))
	return err
}

// Clear removes what starts a slot, before its system is written.
func (p Partition) Clear(slot string) error {
	names, err := p.entries(slot)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range append(names, filepath.Join(grubDir, slot+entryCfg), filepath.Join(systemsDir, slot+".efi")) {
		if err := os.Remove(p.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for _, dir := range []string{entriesDir, grubDir, systemsDir} {
		errs = append(errs, boot.SyncDir(p.path(dir)))
	}
	return errors.Join(errs...)
}

// Start makes the boot loaders start what boot.Slots says.
func (p Partition) Start(slots boot.Slots) error {
	if err := p.directories(); err != nil {
		return err
	}
	trying, choice := "", slots.Choice
	for _, name := range boot.SlotNames {
		slot := slots.Of(name)
		if slot.State == boot.SlotEmpty || slot.State == "" {
			if err := p.Clear(name); err != nil {
				return err
			}
			continue
		}
		line := slots.Line(name)
		_, kind, _ := strings.Cut(slots.Trial(name), boot.ParamTrial)
		if kind = strings.TrimPrefix(kind, "="); kind == "" && slots.Unproven(name) {
			kind = once
		}
		if err := p.startUEFI(name, kind, *slot, name == slots.Choice, line); err != nil {
			return err
		}
		if err := p.startBIOS(name, slot.Version, line); err != nil && slot.State != boot.SlotBad {
			return err
		}
		if slot.State == boot.SlotTrying && slot.Tries > 0 {
			trying = name
		}
		if choice == "" { // no system is known to work yet
			choice = name
		}
	}
	return p.put(environmentBlock(choice, trying), grubDir, environment)
}

// startUEFI writes the entry of systemd-boot, which starts the one with the highest version that has a try left. kind
// is that of a trial; "": it is none.
func (p Partition) startUEFI(name, kind string, slot boot.Slot, chosen bool, line string) error {
	version, count := 1, ""
	switch {
	case slot.State == boot.SlotTrying:
		version, count = 3, fmt.Sprintf("+%d", slot.Tries)
	case slot.State == boot.SlotBad:
		count = "+0"
	case chosen:
		version = 2
	}
	id, options := strings.ToLower(name), "options "+line+"\n"
	if image, err := readImageFile(p.System(name)); err == nil && image.Signed {
		if options = ""; kind != "" {
			id += "-" + kind
		}
	}
	// A count that systemd-boot has changed has the failed tries in addition.
	file := entryPrefix + id + count + entrySuffix
	had, err := p.entries(name)
	if err != nil {
		return err
	}
	content := fmt.Sprintf("title Garboard %s (slot %s)\nsort-key garboard\nversion %d\nefi /%s/%s.efi\n%s",
		slot.Version, name, version, systemsDir, name, options)
	if err := p.put([]byte(content), entriesDir, file); err != nil {
		return err
	}
	for _, other := range had {
		if filepath.Base(other) == file {
			continue
		}
		if err := os.Remove(p.path(other)); err != nil {
			return err
		}
	}
	return boot.SyncDir(p.path(entriesDir))
}

// entries are the files of systemd-boot for a slot. After a power cut there may be two.
func (p Partition) entries(slot string) (names []string, err error) {
	all, err := os.ReadDir(p.path(entriesDir))
	prefix := entryPrefix + strings.ToLower(slot)
	for _, e := range all {
		if rest, found := strings.CutPrefix(strings.ToLower(e.Name()), prefix); found && (rest == entrySuffix || strings.HasPrefix(rest, "+") || strings.HasPrefix(rest, "-")) {
			names = append(names, filepath.Join(entriesDir, e.Name()))
		}
	}
	return names, boot.IgnoreMissing(err)
}

// Started reports whether a boot loader has started the system in a slot that is trying.
func (p Partition) Started(slot string) (bool, error) {
	names, err := p.entries(slot)
	if err != nil {
		return false, err
	}
	counts := false
	for _, name := range names {
		if strings.Contains(filepath.Base(name), "+0-") {
			return true, nil
		}
		counts = counts || strings.Contains(filepath.Base(name), "+")
	}
	if !counts { // the power went before a boot loader knew that the system is trying
		return false, nil
	}
	data, err := os.ReadFile(p.path(grubDir, environment))
	if err != nil {
		return false, err
	}
	return !strings.Contains(string(data), "\n"+variableTrying+"="+slot+"\n"), nil
}
