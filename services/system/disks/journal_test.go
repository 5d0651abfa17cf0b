package disks

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
)

// Everything that a reset may name fits into the journal's sector.
func TestJournalOfUserDisks(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var users []UserDisk
	for i := range maxUserDisks {
		users = append(users, UserDisk{Path: "/dev/sdb", Serial: strings.Repeat("x", i+1)})
	}
	users = append(users, UserDisk{Path: "/dev/sdc"}) // can't be identified after a restart
	want := disk.Journal{Step: disk.StepWipe, Label: strings.Join(boot.WipeLabels, " "), Disks: marks(users), Mode: boot.WipeOverwrite}
	if err := errors.Join(file.Truncate(2<<20), disk.WriteJournal(file, want)); err != nil {
		t.Fatal(err)
	}
	dev, err := disk.Disk{Identity: disk.Identity{Path: file.Name(), Size: 2 << 20}, Sector: 512}.Inspect()
	if got := dev.Pending; err != nil || got.Step != want.Step || got.Label != want.Label || got.Mode != want.Mode || len(got.Disks) != maxUserDisks || !slices.Equal(got.Disks, want.Disks) {
		t.Errorf("%+v, %v", got, err)
	}
}
