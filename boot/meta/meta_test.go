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

func put(s *Store, n int) error {
	return s.Update(func(c Change) error {
		return errors.Join(reason.Put(c, fmt.Sprintf("reason %d", n)), counter.Put(c, n))
	})
}

func TestValuesAreReadAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "meta")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	for n := range 5 {
		s, f, err := OpenFile(path)
		if n == 0 != errors.Is(err, ErrEmpty) || n > 0 && err != nil {
			t.Fatalf("open %d: %v", n, err)
		}
		if n > 0 {
			if got, err := counter.Get(s); err != nil || got != n-1 {
				t.Errorf("%d, %v", got, err)
			}
		} else if _, err := counter.Get(s); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
		if err := put(s, n); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s, f, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before, err := os.ReadFile(path)
	if err == nil {
		err = s.Update(func(c Change) error { _, err := counter.In(c); return err })
	}
	if after, readErr := os.ReadFile(path); err != nil || readErr != nil || !bytes.Equal(before, after) {
		t.Errorf("reading has written: %v, %v", err, readErr)
	}
	if err := s.Update(func(c Change) error { counter.Delete(c); return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := counter.Get(s); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// After a write that was cut off at any byte, either all old values are there or all new ones.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		d := newDisk()
		s, err := Open(d, size)
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
		if got, err := counter.Get(s); err != nil || got != last-1 {
			rt.Errorf("it has %d, %v", got, err)
		}
		d.cut, d.off = -1, false
		s, err = Open(d, size)
		if err != nil {
			rt.Fatal(err)
		}
		n, err := counter.Get(s)
		text, err2 := reason.Get(s)
		if err != nil || err2 != nil || n != last-1 && n != last || text != fmt.Sprintf("reason %d", n) {
			rt.Fatalf("%d, %q, %v, %v", n, text, err, err2)
		}
		if err := put(s, 99); err != nil {
			rt.Fatal(err)
		}
		if s, err = Open(d, size); err != nil {
			rt.Fatal(err)
		}
		if n, err := counter.Get(s); err != nil || n != 99 {
			rt.Errorf("%d, %v", n, err)
		}
	})
}

// One copy may be damaged at any byte: the other one is read.
func TestDamagedCopy(t *testing.T) {
	t.Parallel()
	d := newDisk()
	s, _ := Open(d, size)
	for n := range 2 {
		if err := put(s, n); err != nil {
			t.Fatal(err)
		}
	}
	for at := range headerSize + 20 {
		damaged := &disk{data: bytes.Clone(d.data), cut: -1}
		damaged.data[size/2+at] ^= 0x10
		s, err := Open(damaged, size)
		if err != nil {
			t.Fatalf("byte %d: %v", at, err)
		}
		if n, err := counter.Get(s); err != nil || n != 0 {
			t.Errorf("byte %d: %d, %v", at, n, err)
		}
	}
}

// Two stores of one partition keep what the other one has written.
func TestTwoStores(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "meta")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	one, f, err := OpenFile(path)
	if !errors.Is(err, ErrEmpty) {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Use(path, func(c Change) error { return reason.Put(c, "of the other one") }); err != nil {
		t.Fatal(err)
	}
	if err := one.Update(func(c Change) error { return counter.Put(c, 1) }); err != nil {
		t.Fatal(err)
	}
	if err := Use(path, func(c Change) error {
		text, err := reason.In(c)
		n, err2 := counter.In(c)
		if text != "of the other one" || n != 1 {
			t.Errorf("META has %q and %d", text, n)
		}
		return errors.Join(err, err2)
	}); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsNotTaken(t *testing.T) {
	t.Parallel()
	if _, err := Open(newDisk(), smallest-1); err == nil {
		t.Error("a partition that is too small is taken")
	}
	d := newDisk()
	s, _ := Open(d, size)
	if err := s.Update(func(c Change) error { return reason.Put(c, string(make([]byte, MaxSize))) }); err == nil {
		t.Error("a value that is too large is written")
	}
	stop := errors.New("stop")
	if err := s.Update(func(c Change) error { return errors.Join(counter.Put(c, 1), stop) }); !errors.Is(err, stop) {
		t.Error(err)
	}
	if _, err := counter.Get(s); !errors.Is(err, ErrNotFound) {
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
	if _, err := Open(d, size); !errors.Is(err, ErrNewer) {
		t.Errorf("%v", err)
	}
}

func FuzzOpen(f *testing.F) {
	d := newDisk()
	s, _ := Open(d, size)
	if err := put(s, 7); err != nil {
		f.Fatal(err)
	}
	f.Add(d.data[:200])
	f.Add([]byte("GBMETA\r\n\x00\x00\x00\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		d := newDisk()
		copy(d.data, data)
		s, err := Open(d, size)
		if s == nil {
			return
		}
		if err != nil && !errors.Is(err, ErrEmpty) {
			t.Fatal(err)
		}
		if err := put(s, 3); err != nil {
			t.Fatal(err)
		}
		s, err = Open(d, size)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := counter.Get(s); err != nil || n != 3 {
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
	s, _ := Open(d, size)
	if err := put(s, 5); err != nil {
		t.Fatal(err)
	}
	partition("sda1", "EFI", d.data)
	partition("sda2", "META", make([]byte, size))
	partition("sda3", "META", []byte("short"))
	if _, _, err := Find(sys, dev); err == nil {
		t.Error("another's is taken")
	}
	partition("sdb4", "META", d.data)
	s, f, err := Find(sys, dev)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := counter.Get(s); err != nil || n != 5 {
		t.Errorf("%d, %v", n, err)
	}
}

// Delete removes the value, if there is one.
func (k Key[T]) Delete(c Change) { delete(c.values, k.Name) }
