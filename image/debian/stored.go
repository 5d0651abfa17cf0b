package debian

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/kernel/deb"
)

// storedFile is the answer in the cache.
const storedFile = "packages.json"

// Stored returns what ask answered when it was last asked this question about the lists. Answers are in the cache under
// name.
func Stored(ctx context.Context, store *cache.Store, name string, lists deb.Lists, question []string, ask func(context.Context) ([]deb.Package, error)) ([]deb.Package, error) {
	key, err := lists.Key()
	if err != nil {
		return nil, err
	}
	dir, err := store.Build(ctx, name, append(question, key), func(ctx context.Context, dir string) error {
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
