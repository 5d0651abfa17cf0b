package meta

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

const size = 1 << 20

// disk is a partition in memory. If cut isn't negative, writes are cut off
// after that many bytes, as if the machine lost power.
type disk struct {
	data []byte
	cut  int
	off  bool
}

var errOff = errors.New("the power is off")

func newDisk() *disk { return &disk{data: make([]byte, size), cut: -1} }

func (d *disk) ReadAt(p []byte, at int64) (int, error) {
	return bytes.NewReader(d.data).ReadAt(p, at)
}

func (d *disk) WriteAt(p []byte, at int64) (int, error) {
	if d.off {
		return 0, errOff
	}
	if d.cut >= 0 {
		d.off = true
		n := copy(d.data[at:], p[:min(d.cut, len(p))])
		return n, errOff
	}
	return copy(d.data[at:], p), nil
}

func (d *disk) Sync() error {
	if d.off {
		return errOff
	}
	return nil
}

var (
	reason  = Key[string]{"reason"}
	counter = Key[int]{"counter"}
)

// store is a partition.
type store struct {
	device Device
	size   int64
}

func reopen(device Device, size int64) (store, error) {
	_, err := load(device, size)
	return store{device, size}, err
}

func (s store) update(change func(c Change) error) error { return Update(s.device, s.size, change) }

// number is the value of counter; -1: there is none.
func (s store) number() (n int, err error) {
	c, err := load(s.device, s.size)
	if _, there := c.values[counter.Name]; !there {
		return -1, err
	}
	return counter.In(Change{c.values})
}

func put(s store, n int) error {
	return s.update(func(c Change) error {
		return errors.Join(reason.Put(c, fmt.Sprintf("reason %d", n)), counter.Put(c, n))
	})
}

func TestValuesAreReadAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "meta")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	number := func() (n int, there bool) {
		t.Helper()
		err := Use(path, func(c Change) (err error) {
			_, there = c.values[counter.Name]
			n, err = counter.In(c)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n, there
	}
	for n := range 5 {
		if got, there := number(); there != (n > 0) || there && got != n-1 {
			t.Errorf("%d, %v", got, there)
		}
		err := Use(path, func(c Change) error {
			return errors.Join(reason.Put(c, fmt.Sprintf("reason %d", n)), counter.Put(c, n))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.ReadFile(path)
	number()
	if after, readErr := os.ReadFile(path); err != nil || readErr != nil || !bytes.Equal(before, after) {
		t.Errorf("reading has written: %v, %v", err, readErr)
	}
	if err := Use(path, func(c Change) error { counter.Delete(c); return nil }); err != nil {
		t.Fatal(err)
	}
	if n, there := number(); there {
		t.Error(n)
	}
}

// After a write that was cut off at any byte, either all old values are there or all new ones.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		d := newDisk()
		s, err := reopen(d, size)
		if !errors.Is(err, ErrEmpty) {
			rt.Fatal(err)
		}
		last := rapid.IntRange(1, 4).Draw(rt, "writes")
		for n := range last {
			if err := put(s, n); err != nil {
				rt.Fatal(err)
			}
		}
		d.cut = rapid.IntRange(0, sector).Draw(rt, "cut")
		if err := put(s, last); err == nil {
			rt.Fatal("it was written without power")
		}
		d.cut, d.off = -1, false
		s, err = reopen(d, size)
		if err != nil {
			rt.Fatal(err)
		}
		n, err := s.number()
		c, err2 := load(d, size)
		text, err3 := reason.In(Change{c.values})
		if errors.Join(err, err2, err3) != nil || n != last-1 && n != last || text != fmt.Sprintf("reason %d", n) {
			rt.Fatalf("%d, %q, %v", n, text, errors.Join(err, err2, err3))
		}
		if err := put(s, 99); err != nil {
			rt.Fatal(err)
		}
		if s, err = reopen(d, size); err != nil {
			rt.Fatal(err)
		}
		if n, err := s.number(); err != nil || n != 99 {
			rt.Errorf("%d, %v", n, err)
		}
	})
}

// One copy may be damaged at any byte: the other one is read.
func TestDamagedCopy(t *testing.T) {
	t.Parallel()
	d := newDisk()
	s, _ := reopen(d, size)
	for n := range 2 {
		if err := put(s, n); err != nil {
			t.Fatal(err)
		}
	}
	for at := range headerSize + 20 {
		damaged := &disk{data: bytes.Clone(d.data), cut: -1}
		damaged.data[size/2+at] ^= 0x10
		s, err := reopen(damaged, size)
		if err != nil {
			t.Fatalf("byte %d: %v", at, err)
		}
		if n, err := s.number(); err != nil || n != 0 {
			t.Errorf("byte %d: %d, %v", at, n, err)
		}
	}
}

func TestWhatIsNotTaken(t *testing.T) {
	t.Parallel()
	if _, err := reopen(newDisk(), smallest-1); err == nil {
		t.Error("a partition that is too small is taken")
	}
	d := newDisk()
	s, _ := reopen(d, size)
	if err := s.update(func(c Change) error { return reason.Put(c, string(make([]byte, MaxSize))) }); err == nil {
		t.Error("a value that is too large is written")
	}
	stop := errors.New("stop")
	if err := s.update(func(c Change) error { return errors.Join(counter.Put(c, 1), stop) }); !errors.Is(err, stop) {
		t.Error(err)
	}
	if n, _ := s.number(); n != -1 {
		t.Error("what was called off is there")
	}
	// A newer release's values are not changed, whichever copy has them.
	if err := put(s, 1); err != nil {
		t.Fatal(err)
	}
	h := header{Magic: magic, Version: version + 1, Seq: 1}
	h.Sum = sum(h, nil)
	var newer bytes.Buffer
	if err := binary.Write(&newer, binary.BigEndian, h); err != nil {
		t.Fatal(err)
	}
	copy(d.data[size/2:], newer.Bytes())
	if _, err := reopen(d, size); !errors.Is(err, ErrNewer) {
		t.Errorf("%v", err)
	}
}

func FuzzOpen(f *testing.F) {
	d := newDisk()
	s, _ := reopen(d, size)
	if err := put(s, 7); err != nil {
		f.Fatal(err)
	}
	f.Add(d.data[:200])
	f.Add([]byte("GBMETA\r\n\x00\x00\x00\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		d := newDisk()
		copy(d.data, data)
		s, err := reopen(d, size)
		if err != nil && !errors.Is(err, ErrEmpty) {
			return
		}
		if err := put(s, 3); err != nil {
			t.Fatal(err)
		}
		s, err = reopen(d, size)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := s.number(); err != nil || n != 3 {
			t.Fatalf("%d, %v", n, err)
		}
	})
}

// Of several partitions with the name, the one with Garboard's values is used.
func TestFind(t *testing.T) {
	t.Parallel()
	sys, dev := t.TempDir(), t.TempDir()
	partition := func(device, name string, content []byte) {
		t.Helper()
		if err := errors.Join(
			os.Mkdir(filepath.Join(sys, device), 0o700),
			os.WriteFile(filepath.Join(sys, device, "uevent"), []byte("MAJOR=8\nDEVNAME="+device+"\nDEVTYPE=partition\nPARTNAME="+name+"\n"), 0o600),
			os.WriteFile(filepath.Join(dev, device), content, 0o600),
		); err != nil {
			t.Fatal(err)
		}
	}
	d := newDisk()
	s, _ := reopen(d, size)
	if err := put(s, 5); err != nil {
		t.Fatal(err)
	}
	partition("sda1", "EFI", d.data)
	partition("sda2", "META", make([]byte, size))
	partition("sda3", "META", []byte("short"))
	if _, err := Find(sys, dev); err == nil {
		t.Error("another's is taken")
	}
	partition("sdb4", "META", d.data)
	if path, err := Find(sys, dev); err != nil || filepath.Base(path) != "sdb4" {
		t.Errorf("%s, %v", path, err)
	}
}

// Delete removes the value, if there is one.
func (k Key[T]) Delete(c Change) { delete(c.values, k.Name) }
