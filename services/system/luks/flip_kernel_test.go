//go:build kernel

package luks

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/garboard-os/garboard/services/system/disk"
)

// S-163: bytes of the header are flipped in its first copy, in its second one, and in both. With one good copy, the
// volume opens, and the header is repaired. Without, it is refused, and nothing is made in its place.
func TestFlippedHeader(t *testing.T) {
	v := newVolume(t, key(0, "first"), key(3, "second"))
	v.create()
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	const size = 32 << 10
	good := make([]byte, 2*size)
	f, err := os.OpenFile(v.device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(good, 0); err != nil {
		t.Fatal(err)
	}
	const version = 6 // cryptsetup refuses a first header of another version, and doesn't look for the second one
	// magic, version, size, sequence, label, checksum's name, salt, UUID, subsystem, offset, padding, checksum
	offsets := []int{0, version, 8, 15, 16, 24, 72, 104, 168, 208, 256, 264, 448, 479, 512, 4095, size - 1}
	json := bytes.IndexByte(good[headerSize:], 0)
	for at := 0; at < json; at += json/24 + 1 {
		offsets = append(offsets, headerSize+at)
	}
	opened, refused := 0, 0
	for _, at := range offsets {
		for which, copies := range map[string][]int{"first": {0}, "second": {size}, "both": {0, size}} {
			bad := bytes.Clone(good)
			for _, start := range copies {
				bad[start+at] ^= 0x5a
			}
			if _, err := f.WriteAt(bad, 0); err != nil {
				t.Fatal(err)
			}
			v.log.Reset()
			if v.survives(f, fmt.Sprintf("byte %d of %s", at, which), bad, which == "second" || which == "first" && at != version) {
				opened++
			} else {
				refused++
			}
		}
	}
	if _, err := f.WriteAt(good, 0); err != nil {
		t.Fatal(err)
	}
	v.is()
	t.Logf("%d offsets: opened %d times, refused %d times", len(offsets), opened, refused)
}

// survives opens a volume with a flipped header, and reports whether that worked.
func (v *volume) survives(f *os.File, what string, bad []byte, repairable bool) bool {
	v.t.Helper()
	above, err := v.Open(v.t.Context(), v.device)
	if err == nil && above != v.device {
		got := make([]byte, len(mark))
		if mapped, err := os.Open(above); err != nil {
			v.t.Error(err)
		} else if _, err := mapped.Read(got); err != nil || string(got) != mark {
			v.t.Errorf("%s: it has %q, %v", what, got, err)
		} else {
			mapped.Close()
		}
		if err := damage(v.device); err != nil || !bytes.Contains(v.log.Bytes(), []byte("is repaired from its copy")) {
			v.t.Errorf("%s: %v, log %s", what, err, v.log.String())
		}
		if err := v.Close(); err != nil {
			v.t.Fatal(err)
		}
		return true
	}
	now := make([]byte, len(bad))
	if _, failed := f.ReadAt(now, 0); failed != nil || !bytes.Equal(now, bad) {
		v.t.Errorf("%s: what isn't opened was written to: %v", what, failed)
	}
	if repairable {
		v.t.Errorf("%s: refused: %v", what, err)
	}
	on, onErr := v.On(v.device)
	blank, blankErr := disk.IsBlank(v.device)
	if !on && blank || onErr != nil || blankErr != nil { // so the volume refuses it, or an encrypted one stays closed
		v.t.Errorf("%s: it would be made anew: %v, %v", what, onErr, blankErr)
	}
	return false
}
