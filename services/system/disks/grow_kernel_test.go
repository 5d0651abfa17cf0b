//go:build kernel

package disks

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"golang.org/x/sys/unix"
)

// enlarge gives the disk another size, which the kernel sees.
func (l *loop) enlarge(size int64) {
	l.t.Helper()
	if err := os.Truncate(l.file, size); err != nil {
		l.t.Fatal(err)
	}
	l.control(unix.LOOP_SET_CAPACITY)
}

// control is an ioctl of the disk without an argument.
func (l *loop) control(request uint) {
	l.t.Helper()
	dev, err := os.OpenFile(l.path, os.O_RDWR, 0)
	if err != nil {
		l.t.Fatal(err)
	}
	defer dev.Close()
	if err := unix.IoctlSetInt(int(dev.Fd()), request, 0); err != nil {
		l.t.Fatal(err)
	}
}

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
	install := config.Install{Disk: l.path}
	m := bootMachine(t, l)
	m.mustUp(install)
	m.write("var/mine", "kept")
	was := m.size()
	m.off()
	l.enlarge(6 * gib)
	for _, cut := range []string{"grow", "resize"} {
		m = bootMachine(t, l)
		m.cut = cut
		if found, err := m.disks.MountState(t.Context()); !found || err != nil {
			t.Fatalf("STATE: %v, %v", found, err)
		}
		if err := m.up(install); !errors.Is(err, errPowerCut) {
			t.Fatalf("cut before %s: %v", cut, err)
		}
		m.off()
		l.control(unix.BLKRRPART) // as the kernel does at its start
	}
	m = bootMachine(t, l)
	m.mustUp(install)
	if grown := m.size() - was; grown < 2*gib*9/10 || m.read("var/mine") != "kept" {
		t.Errorf("EPHEMERAL has %s more of 2 GiB, and %q", bytesText(grown), m.read("var/mine"))
	}
	f, err := m.disks.inspect(*m.disks.system)
	if err != nil || layoutOf(f.table) != boot.Layout {
		t.Fatalf("%+v, %v", f, err)
	}
	file, err := os.Open(l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := f.table.Verify(file, 6*gib); err != nil {
		t.Errorf("the backup table isn't at the end of the disk: %v", err)
	}

	// The kernel shows the new size at once when nothing is cut.
	before := m.size()
	m.off()
	l.enlarge(7 * gib)
	m = bootMachine(t, l)
	m.mustUp(install)
	if grown := m.size() - before; grown < gib*9/10 {
		t.Errorf("EPHEMERAL has %s more of 1 GiB", bytesText(grown))
	}
}
