//go:build kernel

package disks

import (
	"errors"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
)

// S-023: a configuration can be on a volume labelled metal-iso, in either case,
// on any disk or CD.
func TestVolumeIsFoundByItsLabel(t *testing.T) {
	for _, label := range []string{"metal-iso", "METAL-ISO"} {
		l := newLoop(t, 4<<20)
		l.writeAt(32769, "CD001")
		l.writeAt(32808, label+strings.Repeat(" ", 32-len(label)))
		device, kind, err := bootMachine(t, l).disks.findVolume("metal-iso")
		if err != nil || device != l.path || kind != "iso9660" {
			t.Errorf("%s: found %q of type %q, error %v; want %q, iso9660", label, device, kind, err, l.path)
		}
	}
}

func TestOtherVolumesAreNotTaken(t *testing.T) {
	other, none := newLoop(t, 4<<20), newLoop(t, 4<<20)
	other.writeAt(32769, "CD001")
	other.writeAt(32808, "holidays"+strings.Repeat(" ", 24))
	_, _, err := bootMachine(t, other, none).disks.findVolume("metal-iso")
	if !errors.Is(err, boot.ErrNone) {
		t.Errorf("error %v, want one that says there is none", err)
	}
}
