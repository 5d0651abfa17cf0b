package loader

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot/esp"
)

// Names of the files in a saved directory, besides those that are installed on a disk.
const (
	savedStub   = "stub.efi"
	savedBIOS   = "bios.img"
	savedHybrid = "hybrid.img"
	savedIPXE   = "undionly.kpxe"
)

func (l *Loader) contents() map[string]*[]byte {
	return map[string]*[]byte{savedStub: &l.Stub, savedBIOS: &l.BIOS, savedHybrid: &l.BootHybrid, savedIPXE: &l.IPXE}
}

// Save writes the boot loaders to a directory.
func (l Loader) Save(dir string) error {
	files := map[string][]byte{}
	for name, content := range l.contents() {
		files[name] = *content
	}
	for _, name := range []string{esp.SystemdBoot, esp.GRUBRecord, esp.GRUBProgram} {
		content, err := os.ReadFile(filepath.Join(l.Disk, name))
		if err != nil {
			return err
		}
		files[name] = content
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Open reads the boot loaders that Save has written.
func Open(dir string) (Loader, error) { return open(dir, dir) }

func open(dir, disk string) (l Loader, err error) {
	l.Disk = disk
	for name, content := range l.contents() {
		if *content, err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return l, fmt.Errorf("boot loader: %w", err)
		}
	}
	return l, nil
}
