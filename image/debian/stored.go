package debian

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/kernel/deb"
)

// storedFile is the answer in the cache.
const storedFile = "packages.json"

// aptKnowledge is what apt's answers come from: its lists, and the settings that choose among them.
var aptKnowledge = []string{
	"/var/lib/apt/lists",
	"/etc/apt/sources.list", "/etc/apt/sources.list.d",
	"/etc/apt/preferences", "/etc/apt/preferences.d",
}

// Stored gives back what ask answered when it was last asked this question, for as long as apt knows the same; it asks where that is new.
// Answers are in the cache under name.
func Stored(ctx context.Context, store *cache.Store, name string, question []string, ask func(context.Context) ([]deb.Package, error)) ([]deb.Package, error) {
	state, err := stateOf(aptKnowledge...)
	if err != nil {
		return nil, err
	}
	dir, err := store.Build(ctx, name, append([]string{state}, question...), func(ctx context.Context, dir string) error {
		packages, err := ask(ctx)
		if err != nil {
			return err
		}
		answer, err := json.Marshal(packages)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, storedFile), answer, 0o644)
	})
	if err != nil {
		return nil, err
	}
	answer, err := os.ReadFile(filepath.Join(dir, storedFile))
	if err != nil {
		return nil, err
	}
	var packages []deb.Package
	if err := json.Unmarshal(answer, &packages); err != nil {
		return nil, fmt.Errorf("read %s: %w", dir, err)
	}
	return packages, nil
}

// stateOf changes whenever one of the files, or a file in one of the folders, does. Those that aren't there are part of it too.
func stateOf(paths ...string) (string, error) {
	var state strings.Builder
	for _, path := range paths {
		err := filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // or it went away just now, because apt-get update runs
			}
			if err != nil {
				return err
			}
			if d.IsDir() {
				if name != path {
					return fs.SkipDir // partial downloads, which aren't for everybody to read
				}
				return nil
			}
			info, err := os.Stat(name)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if info.Mode().IsRegular() && d.Name() != "lock" {
				fmt.Fprintln(&state, name, info.Size(), info.ModTime().UnixNano())
			}
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	return state.String(), nil
}
