package esp

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// partition has the loaders, and a system in both slots.
func partition(t *testing.T) Partition {
	t.Helper()
	p := Partition(t.TempDir())
	if err := p.Loaders([]byte("systemd-boot")); err != nil {
		t.Fatal(err)
	}
	for _, slot := range boot.SlotNames {
		if err := os.WriteFile(p.System(slot), uki.Image(t, "v1", "quiet"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// files are all in a directory of the partition.
func (p Partition) files(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(p.path(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestWhatStarts(t *testing.T) {
	t.Parallel()
	good, trying, bad := boot.Slot{State: boot.SlotGood, Version: "v1"}, boot.Slot{State: boot.SlotTrying, Tries: 1, Version: "v2"}, boot.Slot{State: boot.SlotBad, Version: "v2"}
	for name, c := range map[string]struct {
		slots               boot.Slots
		entries             []string
		highest             string // of the entries' versions
		environment, script string
	}{
		"a new machine":           {boot.Slots{A: trying}, []string{"garboard-a+1.conf"}, "garboard-a+1.conf", "choice=A\ntrying=A\n", "A.cfg"},
		"installed":               {boot.Slots{A: good, Choice: "A"}, []string{"garboard-a.conf"}, "garboard-a.conf", "choice=A\ntrying=\n", "A.cfg"},
		"upgraded":                {boot.Slots{A: good, B: trying, Choice: "A"}, []string{"garboard-a.conf", "garboard-b+1.conf"}, "garboard-b+1.conf", "choice=A\ntrying=B\n", "A.cfg B.cfg"},
		"the upgrade is good":     {boot.Slots{A: good, B: good, Choice: "B"}, []string{"garboard-a.conf", "garboard-b.conf"}, "garboard-b.conf", "choice=B\ntrying=\n", "A.cfg B.cfg"},
		"the upgrade has failed":  {boot.Slots{A: good, B: bad, Choice: "A"}, []string{"garboard-a.conf", "garboard-b+0.conf"}, "garboard-a.conf", "choice=A\ntrying=\n", "A.cfg B.cfg"},
		"a slot is being written": {boot.Slots{A: boot.Slot{State: boot.SlotEmpty}, B: good, Choice: "B"}, []string{"garboard-b.conf"}, "garboard-b.conf", "choice=B\ntrying=\n", "B.cfg"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := partition(t)
			// What an interrupted change has left.
			for _, left := range []string{"garboard-a+1.conf", "garboard-b+0-1.conf", "garboard-b.conf"} {
				if err := p.put([]byte("version 9\n"), entriesDir, left); err != nil {
					t.Fatal(err)
				}
			}
			c.slots.A.Args, c.slots.B.Args = []string{"panic=10", "x=${a}"}, []string{"quiet"}
			for range 2 { // it may be repeated
				if err := p.Start(c.slots); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(c.entries, p.files(t, entriesDir)); diff != "" {
				t.Error(diff)
			}
			best, version := "", ""
			for _, e := range c.entries {
				data, err := os.ReadFile(p.path(entriesDir, e))
				if err != nil {
					t.Fatal(err)
				}
				_, rest, _ := strings.Cut(string(data), "\nversion ")
				if v := rest[:1]; v > version && !strings.Contains(e, "+0") {
					best, version = e, v
				}
				trial := ""
				if c.slots.A.State == boot.SlotTrying {
					trial = map[bool]string{true: " garboard.trial", false: " garboard.trial=alone"}[c.slots.B.State == boot.SlotGood]
				}
				if strings.HasPrefix(e, "garboard-a") && !strings.HasSuffix(string(data), "\noptions panic=10 x=${a} garboard.slot=A"+trial+"\n") {
					t.Errorf("%s", data)
				}
			}
			if best != c.highest {
				t.Errorf("systemd-boot starts %s", best)
			}
			env, err := os.ReadFile(p.path(grubDir, environment))
			if err != nil || len(env) != 1024 || !strings.Contains(string(env), "\n"+c.environment) {
				t.Errorf("%q, %v", env, err)
			}
			scripts := slices.DeleteFunc(p.files(t, grubDir), func(n string) bool { return n == grubConf || n == environment })
			if strings.Join(scripts, " ") != c.script {
				t.Errorf("GRUB's scripts are %q", scripts)
			}
		})
	}
}

// A system that was started once, and isn't good, has failed.
func TestStarted(t *testing.T) {
	t.Parallel()
	slots := boot.Slots{A: boot.Slot{State: boot.SlotGood}, B: boot.Slot{State: boot.SlotTrying, Tries: 1}, Choice: "A"}
	for name, c := range map[string]struct {
		by   func(p Partition) error
		want bool
	}{
		"no": {func(Partition) error { return nil }, false},
		"by systemd-boot": {func(p Partition) error {
			return os.Rename(p.path(entriesDir, "garboard-b+1.conf"), p.path(entriesDir, "garboard-b+0-1.conf"))
		}, true},
		"by GRUB": {func(p Partition) error { return p.put(environmentBlock("A", ""), grubDir, environment) }, true},
	} {
		p := partition(t)
		if err := p.Start(slots); err != nil {
			t.Fatal(err)
		}
		if err := c.by(p); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Started("B"); got != c.want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// An image that was cut off, or whose kernel was, is refused.
func TestReadImage(t *testing.T) {
	t.Parallel()
	whole := uki.Image(t, "v1.2.3", "quiet")
	read := func(image []byte) (Image, error) { return ReadImage(bytes.NewReader(image), int64(len(image))) }
	image, err := read(whole)
	if want := (Image{Version: "v1.2.3", Cmdline: "quiet", Kernel: uki.Kernel, Initramfs: uki.Initramfs}); err != nil || image != want {
		t.Errorf("%+v, %v, want %+v", image, err, want)
	}
	for cut := 0; cut < len(whole); cut += 64 {
		if _, err := read(whole[:cut]); err == nil {
			t.Errorf("the first %d of %d bytes are taken", cut, len(whole))
		}
	}
	short := bytes.Clone(whole)
	short[6*512+kernelSize] = 200
	if _, err := read(short); err == nil || !strings.Contains(err.Error(), "the kernel has 1056 of 4224 bytes") {
		t.Errorf("%v", err)
	}
}

// The boot record starts GRUB's program, and the partition table stays.
func TestBootRecord(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(path, bytes.Repeat([]byte{0xee}, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	if err := BootRecord(disk, make([]byte, 512), bytes.Repeat([]byte{1}, 2000), 64<<10, 64<<10); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if at := binary.LittleEndian.Uint64(got[recordAddress:]); at != 128 {
		t.Errorf("the boot record starts sector %d", at)
	}
	if rest := binary.LittleEndian.Uint64(got[64<<10+listAddress:]); rest != 129 {
		t.Errorf("the program goes on in sector %d", rest)
	}
	beside := slices.Concat(got[recordCode:activeAt], got[activeAt+16:64<<10])
	if !bytes.Equal(beside, bytes.Repeat([]byte{0xee}, len(beside))) {
		t.Error("what is beside the boot record was written to")
	}
	if !bytes.Equal(got[activeAt:activeAt+16], active) {
		t.Errorf("the second partition is % x", got[activeAt:activeAt+16])
	}
	if err := BootRecord(disk, make([]byte, 512), make([]byte, 2<<10), 64<<10, 3<<10); err == nil {
		t.Error("a program that is larger than half of its partition was written")
	}
	// The next release's program goes to the other half: until the boot record changes, the former one is whole.
	for i, want := range []uint64{128 + 64, 128 + 64, 128} {
		if err := BootRecord(disk, make([]byte, 512), bytes.Repeat([]byte{byte(2 + i/2)}, 2000), 64<<10, 64<<10); err != nil {
			t.Fatal(err)
		}
		next, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if at := binary.LittleEndian.Uint64(next[recordAddress:]); at != want {
			t.Errorf("program %d: the boot record starts sector %d, not %d", i, at, want)
		}
		if i == 0 && !bytes.Equal(got[recordCode:96<<10], next[recordCode:96<<10]) {
			t.Error("the program that the boot record started was written to")
		}
	}
}

// On a medium, UEFI starts a system of Garboard; on other disks, a boot loader or another system.
func TestDirect(t *testing.T) {
	t.Parallel()
	system := uki.Image(t, "v1", "quiet")
	for name, c := range map[string]struct {
		content []byte
		want    bool
	}{
		"a medium":       {system, true},
		"a boot loader":  {uki.Stub(t, 1024), false},
		"another system": {bytes.Replace(system, []byte("ID=garboard"), []byte("ID=elsewise"), 1), false},
	} {
		p := partition(t)
		if err := p.put(c.content, removable); err != nil {
			t.Fatal(err)
		}
		if got := p.Direct(); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if Partition(t.TempDir()).Direct() {
		t.Error("an empty partition starts a system")
	}
}
