//go:build kernel

package disks

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"golang.org/x/sys/unix"
)

// size is that of the file system of EPHEMERAL, in bytes.
func (m *machineUnderTest) size() int64 {
	m.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(m.dir, "var"), &st); err != nil {
		m.t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

// EPHEMERAL gets the rest of a disk that has become larger, with its data, wherever the power was cut meanwhile.
func TestEphemeralGrowsWithItsDisk(t *testing.T) {
	l := newLoop(t, 4*gib)
	install := config.Install{Disk: l.Path}
	m := bootMachine(t, l)
	m.mustUp(install)
	m.write("var/mine", "kept")
	was := m.size()
	m.off()
	l.Enlarge(6 * gib)
	for _, cut := range []string{"grow", "resize"} {
		m = bootMachine(t, l)
		m.cut = cut
		if found, err := m.mountState(); !found || err != nil {
			t.Fatalf("STATE: %v, %v", found, err)
		}
		if err := m.up(install); !errors.Is(err, errPowerCut) {
			t.Fatalf("cut before %s: %v", cut, err)
		}
		m.off()
		l.Control(unix.BLKRRPART) // as the kernel does at its start
	}
	m = bootMachine(t, l)
	m.mustUp(install)
	if grown := m.size() - was; grown < 2*gib*9/10 || m.read("var/mine") != "kept" {
		t.Errorf("EPHEMERAL has %s more of 2 GiB, and %q", disk.SizeText(grown), m.read("var/mine"))
	}
	f, err := m.disks.System().Inspect()
	if err != nil || f.Layout() != boot.Layout {
		t.Fatalf("%+v, %v", f, err)
	}
	file, err := os.Open(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := f.Table.Verify(file, 6*gib); err != nil {
		t.Errorf("the backup table isn't at the end of the disk: %v", err)
	}

	// The kernel shows the new size at once when nothing is cut.
	before := m.size()
	m.off()
	l.Enlarge(7 * gib)
	m = bootMachine(t, l)
	m.mustUp(install)
	if grown := m.size() - before; grown < gib*9/10 {
		t.Errorf("EPHEMERAL has %s more of 1 GiB", disk.SizeText(grown))
	}
}
