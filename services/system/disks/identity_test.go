package disks

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

func TestMachineIDIsMadeOnceAndKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "etc-machine-id")
	read := func() string {
		t.Helper()
		if err := nameMachine(dir, file); err != nil {
			t.Fatal(err)
		}
		id, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(id)
	}
	first := read()
	if !regexp.MustCompile(`^[0-9a-f]{32}\n$`).MatchString(first) {
		t.Fatalf("%q isn't a machine ID (machine-id(5))", first)
	}
	if second := read(); second != first {
		t.Errorf("the ID changed from %q to %q", first, second)
	}
	// A file that was damaged by a power cut or a user is replaced.
	if err := os.Remove(filepath.Join(dir, "machine-id")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "machine-id"), []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if third := read(); third == first || len(third) != len(first) {
		t.Errorf("a broken ID became %q", third)
	}
}
