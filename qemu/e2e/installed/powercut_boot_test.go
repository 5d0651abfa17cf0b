//go:build e2e && long

package installed

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/vm"
	"golang.org/x/sys/unix"
)

// runsAfterACut cuts the power at a point of these writes to a disk, after the first ones, and starts the disk with
// each firmware: all services of the node come up, etcd with its data among them.
func runsAfterACut(t *testing.T, base string, all []write, first int, capacity int64) {
	t.Helper()
	for name, uefi := range map[string]bool{"cut-uefi": true, "cut-bios": false} {
		seed := uint64(time.Now().UnixNano())
		point := first + rand.New(rand.NewPCG(seed, 0)).IntN(len(all)-first)
		t.Logf("%s: write %d of %d, seed %d", name, point, len(all), seed)
		disk := replayed(t, base, all[:point])
		c, m := e2etest.Start(t, name, qemu.QEMU, func(o *qemu.Options) {
			o.Unconfigured, o.Boot.UEFI, o.DiskGiB = true, uefi, int(capacity>>30)
			o.Hardware = []vm.Hardware{{Medium: vm.OwnDisk}}
			o.Prepare = func(dir string) error { return os.Rename(disk, filepath.Join(dir, "disk.img")) }
		})
		c.Says(2*bootBudget, 0, "machined", "configuration from state")
		c.Eventually(systemBudget, "all services are up", func() error {
			if !strings.Contains(c.Text(), "all services are up") {
				return errors.New("the status on the console doesn't say so")
			}
			return nil
		})
		m.Reached(name + ": all services are up")
		if err := c.Cut(t.Context(), c.Nodes[0].Name); err != nil {
			t.Fatal(err)
		}
	}
}

// replayed is a copy of a disk, with these writes.
func replayed(t *testing.T, base string, all []write) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "disk")
	if err := e2etest.CopySparse(t.Context(), base, path); err != nil {
		t.Fatal(err)
	}
	disk, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	for _, w := range all {
		switch {
		case w.size == 0: // only a flush
		case w.discard:
			if err := unix.Fallocate(int(disk.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, w.at, w.size); err != nil {
				t.Fatal(err)
			}
		default:
			data := make([]byte, w.size)
			if _, err := w.log.ReadAt(data, w.from); err != nil {
				t.Fatal(err)
			}
			if _, err := disk.WriteAt(data, w.at); err != nil {
				t.Fatal(err)
			}
		}
	}
	return path
}
