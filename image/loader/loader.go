// Package loader makes the boot loaders of media and of installed machines: systemd's stub and systemd-boot for UEFI,
// GRUB for BIOS, and iPXE for a BIOS that boots over the network.
package loader

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/progress"
)

// Loader is the content of its files.
type Loader struct {
	// Stub is systemd-stub(7): a program for UEFI that becomes a unified kernel image when kernel and initramfs are put
	// into it.
	Stub []byte
	// BIOS is GRUB for the BIOS, as El Torito starts it. BootHybrid is a boot record that starts it from a disk.
	BIOS, BootHybrid []byte
	// Disk is a folder with what is installed on a disk (boot/esp), under the names that esp has for them.
	Disk string
	// IPXE is iPXE for the network card's own driver in a BIOS, as PXE loads it.
	IPXE []byte
}

// SystemdBoot is the boot loader for UEFI that is installed on a disk.
func (l Loader) SystemdBoot() ([]byte, error) {
	return os.ReadFile(filepath.Join(l.Disk, esp.SystemdBoot))
}

// ConfigFile is what GRUB runs, from the medium that has it.
const ConfigFile = "/garboard.cfg"

// early is GRUB's configuration in BIOS.
//
//go:embed early.cfg
var early string

const (
	step = "loader"

	tree    = "."
	stub    = "usr/lib/systemd/boot/efi/linuxx64.efi.stub"
	grubDir = "usr/lib/grub/i386-pc"
	hybrid  = "boot_hybrid.img"
	record  = "boot.img"
	ipxe    = "usr/lib/ipxe/undionly.kpxe"
	disk    = "disk"

	systemdBoot = "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
	// diskPrefix is where GRUB finds its script: on the first partition of the disk that it was started from.
	diskPrefix = "(,gpt1)/garboard"
)

// modules of GRUB in BIOS, with what they are for.
var modules = []struct{ name, why string }{
	{"biosdisk", "disks and CD drives of the BIOS"},
	{"part_gpt", "partitions of a disk"},
	{"iso9660", "the medium"},
	{"fat", "the file system with the unified kernel image"},
	{"loopback", "files as disks"},
	{"search", "the medium among all disks"},
	{"search_fs_file", "the same, by a file"},
	{"normal", "scripts with conditions"},
	{"test", "conditions"},
	{"echo", "messages"},
	{"serial", "the serial line"},
	{"terminal", "messages on the screen and the serial line"},
	{"sleep", "time to read an error"},
	{"reboot", "another try after an error"},
	{"minicmd", "the BIOS's next device after an error"},
	{"configfile", "the scripts of an installed machine's slots"},
	{"loadenv", "the environment block of an installed machine"},
	{"linux", "the kernel"},
}

// set is what comes from Debian's packages. GRUB's dependencies aren't in moddep.lst only: grub-mkimage needs the list
// and each module.
var set = debian.Set{
	Name: "loader-tools",
	Tree: tree,
	Tools: []debian.Tool{
		{Package: "systemd-boot-efi", Name: stub, Why: "unified kernel images"},
		{Package: "systemd-boot-efi", Name: systemdBoot, Why: "the choice between two systems on a disk"},
		{Package: "grub-common", Name: "grub-mkimage", Why: "GRUB's program out of its modules"},
		{Package: "grub-pc-bin", Name: grubDir, Why: "GRUB for the BIOS"},
		{Package: "ipxe", Name: ipxe, Why: "HTTP for a BIOS that boots over the network"},
	},
}

// copied are the files of the step that are as in the packages.
var copied = map[string]string{
	savedStub: stub, savedHybrid: path.Join(grubDir, hybrid), savedIPXE: ipxe,
	path.Join(disk, esp.SystemdBoot): systemdBoot, path.Join(disk, esp.GRUBRecord): path.Join(grubDir, record),
}

// Build returns the boot loaders, from the cache if they are there.
func Build(ctx context.Context, store *cache.Store, r *progress.Reporter) (Loader, error) {
	from, err := set.Build(ctx, store, r)
	if err != nil {
		return Loader{}, err
	}
	r.Plan(step)
	inputs := []string{filepath.Base(from), early, diskPrefix, fmt.Sprint(copied)}
	for _, m := range modules {
		inputs = append(inputs, m.name)
	}
	dir, err := r.Build(ctx, store, step, inputs, func(ctx context.Context, dir string) error { return makeAll(ctx, from, dir) })
	if err != nil {
		return Loader{}, err
	}
	return open(dir, filepath.Join(dir, disk))
}

// makeAll makes GRUB's programs, and the folder for disks.
func makeAll(ctx context.Context, from, dir string) (err error) {
	config := filepath.Join(dir, ".early.cfg")
	if err := os.WriteFile(config, []byte(early), 0o600); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(config)) }()
	if err := os.Mkdir(filepath.Join(dir, disk), 0o755); err != nil {
		return err
	}
	for name, file := range copied {
		content, err := os.ReadFile(filepath.Join(from, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return errors.Join(
		mkimage(ctx, from, filepath.Join(dir, savedBIOS), "--format=i386-pc-eltorito", "--prefix=/", "--config="+config),
		mkimage(ctx, from, filepath.Join(dir, disk, esp.GRUBProgram), "--format=i386-pc", "--prefix="+diskPrefix),
	)
}

// mkimage makes a program of GRUB. grub-mkimage runs with the libraries of its own release, whatever this machine has.
func mkimage(ctx context.Context, from, to string, args ...string) error {
	libraries := filepath.Join(from, "usr/lib/x86_64-linux-gnu")
	args = append([]string{"--library-path", libraries, filepath.Join(from, "usr/bin/grub-mkimage"),
		"--directory=" + filepath.Join(from, grubDir), "--output=" + to}, args...)
	for _, m := range modules {
		args = append(args, m.name)
	}
	if _, err := program.Output(ctx, from, nil, filepath.Join(libraries, "ld-linux-x86-64.so.2"), args...); err != nil {
		return fmt.Errorf("grub-mkimage: %w", err)
	}
	return nil
}
