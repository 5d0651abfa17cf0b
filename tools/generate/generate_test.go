package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// What is committed is what the generators make today.
func TestCommittedFilesAreCurrent(t *testing.T) {
	t.Parallel()
	const root = "../.."
	for _, g := range generators {
		files, err := g.make(t.Context(), root)
		if err != nil {
			t.Fatalf("%s: %v", g.name, err)
		}
		if len(files) == 0 {
			t.Errorf("%s makes no files", g.name)
		}
		for path, want := range files {
			have, err := os.ReadFile(filepath.Join(root, path))
			if err != nil {
				t.Errorf("%s: %v; run: go run ./tools/generate", g.name, err)
			} else if !bytes.Equal(have, want) {
				t.Errorf("%s isn't what %s makes of its sources; run: go run ./tools/generate", path, g.name)
			}
		}
	}
}
