package disks

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
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
	want := journal{step: stepWipe, label: strings.Join(boot.WipeLabels, " "), disks: marks(users)}
	if err := errors.Join(writeJournal(file, want), file.Truncate(1<<20)); err != nil {
		t.Fatal(err)
	}
	got, err := readJournal(file)
	if err != nil || got.step != want.step || got.label != want.label || len(got.disks) != maxUserDisks || !slices.Equal(got.disks, want.disks) {
		t.Errorf("%+v, %v", got, err)
	}
}
