package container

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRaise(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text, want string
		was        int
	}{
		{"128\n", "8192", 128}, {"8192\n", "8192\n", 8192}, {"65536\n", "65536\n", 65536},
	} {
		file := filepath.Join(t.TempDir(), "limit")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		was, err := raise(file, inotifyInstances)
		if err != nil || was != tt.was {
			t.Errorf("%q was %d, %v", tt.text, was, err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != tt.want {
			t.Errorf("%q became %q, %v", tt.text, got, err)
		}
	}
	if _, err := raise(filepath.Join(t.TempDir(), "none"), 1); err == nil {
		t.Error("a limit that isn't there was raised")
	}
}
