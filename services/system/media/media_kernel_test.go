//go:build kernel

package media

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
	"github.com/garboard-os/garboard/tools/testing/uml"
)

func TestMain(m *testing.M) { uml.Main(m) }

// finder is that of a machine with only these disks.
func finder(t *testing.T, disks ...*loopdisk.Disk) *Finder {
	t.Helper()
	uml.Booted(t)
	return New(Finder{System: func() *disk.Disk { return nil }, Disks: &disk.Inventory{Is: func(name string) bool {
		return slices.ContainsFunc(disks, func(l *loopdisk.Disk) bool { return l.Name == name })
	}}})
}

// S-023: a configuration can be on a volume labelled metal-iso, in either case,
// on any disk or CD.
func TestVolumeIsFoundByItsLabel(t *testing.T) {
	for _, label := range []string{"metal-iso", "METAL-ISO"} {
		l := loopdisk.New(t, 4<<20)
		l.WriteAt(32769, "CD001")
		l.WriteAt(32808, label+strings.Repeat(" ", 32-len(label)))
		d := finder(t, l)
		found, err := d.find("metal-iso", d.holdsVolumes)
		if err != nil || !slices.Equal(found, []mountable{{l.Path, "iso9660"}}) {
			t.Errorf("%s: found %v, error %v; want %q, iso9660", label, found, err, l.Path)
		}
	}
}

func TestOtherVolumesAreNotTaken(t *testing.T) {
	other, none := loopdisk.New(t, 4<<20), loopdisk.New(t, 4<<20)
	other.WriteAt(32769, "CD001")
	other.WriteAt(32808, "holidays"+strings.Repeat(" ", 24))
	d := finder(t, other, none)
	found, err := d.find("metal-iso", d.holdsVolumes)
	if err != nil || len(found) > 0 {
		t.Errorf("found %v, error %v", found, err)
	}
	err = d.Volume(t.Context(), "metal-iso", func(fs.FS) error { return nil })
	if !errors.Is(err, boot.ErrNone) {
		t.Errorf("error %v, want one that says there is none", err)
	}
}

// All volumes with a label count, and a device that comes is noticed.
func TestVolumesOfOneLabel(t *testing.T) {
	one, two := loopdisk.New(t, 4<<20), loopdisk.New(t, 4<<20)
	for _, l := range []*loopdisk.Disk{one, two} {
		l.WriteAt(32769, "CD001")
		l.WriteAt(32808, "GARBOARD"+strings.Repeat(" ", 24))
	}
	d := finder(t, one, two)
	found, err := d.find(boot.MediumLabel, d.holdsVolumes)
	slices.SortFunc(found, func(a, b mountable) int { return strings.Compare(a.device, b.device) })
	want := []string{one.Path, two.Path}
	slices.Sort(want)
	if err != nil || len(found) != 2 || found[0].device != want[0] || found[1].device != want[1] {
		t.Errorf("found %v, error %v, want %q", found, err, want)
	}
	before := d.Devices()
	if again := d.Devices(); again != before {
		t.Errorf("%q, and then %q", before, again)
	}
	loopdisk.New(t, 4<<20)
	if d.Devices() == before {
		t.Error("a device that has come isn't noticed")
	}
}
