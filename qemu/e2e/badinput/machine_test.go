//go:build e2e && long

package badinput

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// bootBudget is for a machine to look for its disk and its network, at native
// speed.
const bootBudget = 5 * time.Second

// small is a machine that only boots: nothing large starts before it reports
// the problem.
func small(o *qemu.Options) { o.MemoryMiB, o.DiskGiB = 1536, 4 }

// A machine without a disk, and alone on its network, reports both, and
// continues to look.
func TestNoDiskNoDHCP(t *testing.T) {
	c := e2etest.New(t, "bad-bare", qemu.QEMU, small, func(o *qemu.Options) { o.DiskGiB, o.Unplugged = -1, true })
	line := c.Says(bootBudget, 0, "disks: ", "no disk /dev/vda", "still looking", "machine.install.disk", "there are no disks")
	t.Log(line.Text)
	oneLine(t, c, 0, "no disk /dev/vda")
	line = c.Says(bootBudget, 0, "networkd: ", "no DHCP answer on eth0", "asking again", "machine.network.interfaces")
	t.Log(line.Text)
	oneLine(t, c, 0, "no DHCP answer on eth0")
}

// A disk with a foreign file system isn't changed in any byte.
func TestForeignDisk(t *testing.T) {
	var disk string
	c := e2etest.New(t, "bad-foreign", qemu.QEMU, small, func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			disk = filepath.Join(dir, "disk.img")
			return makeForeign(disk)
		}
	})
	line := c.Says(bootBudget, 0, "disks: Failed: ", "disk /dev/vda holds", "ext4", "photos", "isn't touched", "machine.install.wipe", "next try in")
	t.Log(line.Text)
	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	fresh := disk + ".fresh"
	if err := makeForeign(fresh); err != nil {
		t.Fatal(err)
	}
	if same, err := sameFiles(disk, fresh); err != nil || !same {
		t.Errorf("the disk has changed (%v)", err)
	}
}

// The twin of the above: the disk may be erased, and DHCP answers. No time
// server does, which the machine reports before it continues without.
func TestForeignDiskWipedNoTime(t *testing.T) {
	c := e2etest.New(t, "bad-time", qemu.QEMU, small, func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			config := filepath.Join(dir, "config.yaml")
			err := rewrite(config, func(data []byte) []byte {
				data = replaced(t, data, "disk: /dev/vda", "disk: /dev/vda\n    wipe: true")
				// RFC 5737: an address for documents.
				return replaced(t, data, "disabled: true", "servers: [198.51.100.1]\n    bootTimeout: 3s")
			})
			if err != nil {
				return err
			}
			return makeForeign(filepath.Join(dir, "disk.img"))
		}
	})
	c.Says(bootBudget, 0, "disks: ", "erasing /dev/vda, which held", "ext4", "machine.install.wipe is set")
	c.Says(bootBudget, 0, "disks: Running (up): STATE and EPHEMERAL of /dev/vda")
	c.Says(bootBudget, 0, "networkd: Running (up)", "10.5.0.2")
	line := c.Says(bootBudget, 0, "timed: ", "time isn't synchronised after 3s", "198.51.100.1", "going on with the clock at", "machine.time.servers")
	t.Log(line.Text)
	oneLine(t, c, 0, "time isn't synchronised")
	c.Says(bootBudget, 0, "timed: Running (up): not synchronised")
	c.Says(bootBudget, 0, "containerd: Running (up)")
}

const (
	foreignSize = 4 << 30
	foreignUUID = "2f6d9c6e-0b8e-4b6b-9a39-6f2d8f6f7a11"
)

// makeForeign makes a disk with a file system, always the same.
func makeForeign(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(foreignSize); err != nil {
		return err
	}
	cmd := exec.Command("mkfs.ext4", "-q", "-F", "-L", "photos", "-U", foreignUUID, "-E", "hash_seed="+foreignUUID+",lazy_itable_init=1,lazy_journal_init=1", path)
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000", "E2FSPROGS_FAKE_TIME=1700000000")
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = &exec.Error{Name: "mkfs.ext4: " + string(bytes.TrimSpace(out)), Err: err}
	}
	return err
}

// sameFiles compares the beginning, which has all of a small file system.
func sameFiles(a, b string) (bool, error) {
	const enough = 64 << 20
	var data [2][]byte
	for i, path := range []string{a, b} {
		f, err := os.Open(path)
		if err != nil {
			return false, err
		}
		defer f.Close()
		data[i] = make([]byte, enough)
		if _, err := f.ReadAt(data[i], 0); err != nil {
			return false, err
		}
	}
	return bytes.Equal(data[0], data[1]), nil
}
