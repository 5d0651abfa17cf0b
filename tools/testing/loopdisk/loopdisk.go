//go:build linux

// Package loopdisk makes disks of sparse files, for tests with a kernel of their own.
package loopdisk

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// edge is how much of a disk Edges has at its beginning, and at its end.
const edge = 1 << 20

// Disk is a loop device.
type Disk struct {
	Name string // loop3
	Path string
	File string

	t testing.TB
}

// New is a disk of that many bytes, until the test ends.
func New(t testing.TB, size int64) *Disk {
	t.Helper()
	l := &Disk{t: t, File: filepath.Join(t.TempDir(), "disk.img")}
	l.must(errors.Join(os.WriteFile(l.File, nil, 0o600), os.Truncate(l.File, size)))
	dev, err := Attach(l.File, 0)
	if err != nil {
		t.Fatalf("attach a loop device: %v", err)
	}
	l.Path, l.Name = dev.Name(), filepath.Base(dev.Name())
	t.Cleanup(func() { dev.Close() })
	return l
}

// Attach makes a loop device of the content of a file behind an offset. The kernel
// detaches it when no process has it open any more, also after a test was killed.
func Attach(file string, offset uint64) (*os.File, error) {
	back, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer back.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer ctl.Close()
	for {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{
			Fd:   uint32(back.Fd()),
			Info: unix.LoopInfo64{Offset: offset, Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_PARTSCAN},
		})
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) { // another process was faster
			return nil, err
		}
	}
}

func (l *Disk) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// Change opens the disk for writing.
func (l *Disk) Change(do func(dev *os.File) error) {
	l.t.Helper()
	dev, err := os.OpenFile(l.Path, os.O_RDWR, 0)
	l.must(err)
	l.must(errors.Join(do(dev), dev.Close()))
}

// WriteAt writes a text to the disk.
func (l *Disk) WriteAt(at int64, text string) {
	l.t.Helper()
	l.Change(func(dev *os.File) error {
		_, err := dev.WriteAt([]byte(text), at)
		return err
	})
}

// Edges are the first and the last MiB.
func (l *Disk) Edges() []byte {
	l.t.Helper()
	buf := make([]byte, 2*edge)
	l.Change(func(dev *os.File) error {
		end, err := dev.Seek(0, io.SeekEnd)
		_, first := dev.ReadAt(buf[:edge], 0)
		_, last := dev.ReadAt(buf[edge:], end-edge)
		return errors.Join(err, first, last)
	})
	return buf
}

// Enlarge gives the disk another size, which the kernel sees.
func (l *Disk) Enlarge(size int64) {
	l.t.Helper()
	l.must(os.Truncate(l.File, size))
	l.Control(unix.LOOP_SET_CAPACITY)
}

// Control is an ioctl of the disk without an argument.
func (l *Disk) Control(request uint) {
	l.t.Helper()
	l.Change(func(dev *os.File) error { return unix.IoctlSetInt(int(dev.Fd()), request, 0) })
}

// Holds reports whether a text is anywhere on the disk. Most of its file is a hole.
func (l *Disk) Holds(text string) bool {
	l.t.Helper()
	f, err := os.Open(l.File)
	l.must(err)
	defer f.Close()
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return false
		}
		l.must(err)
		at, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		l.must(err)
		data := make([]byte, at-from)
		_, err = f.ReadAt(data, from)
		l.must(err)
		if bytes.Contains(data, []byte(text)) {
			return true
		}
	}
}

// Run runs a program of the host, such as mkfs.
func Run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}
