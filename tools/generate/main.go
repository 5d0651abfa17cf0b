// Command generate writes what is made from other files of the repository and
// committed beside them: the Go code of the machine API, the schema of the
// configuration and its reference page. It needs nothing but Go.
//
//	go run ./tools/generate          everything
//	go run ./tools/generate proto    one of the generators
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const module = "github.com/garboard-os/garboard"

// A generator makes files: path below the root of the repository → content.
type generator struct {
	name string
	make func(ctx context.Context, root string) (map[string][]byte, error)
}

var generators = []generator{
	{"proto", protoFiles},
	{"config", configFiles},
}

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "generate: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, names []string) error {
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !slices.ContainsFunc(generators, func(g generator) bool { return g.name == name }) {
			return fmt.Errorf("there is no generator %q", name)
		}
	}
	for _, g := range generators {
		if len(names) > 0 && !slices.Contains(names, g.name) {
			continue
		}
		files, err := g.make(ctx, root)
		if err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		for path, content := range files {
			if err := write(filepath.Join(root, path), content); err != nil {
				return err
			}
		}
	}
	return nil
}

// write leaves a file that is right as it is, so that nothing is built anew.
func write(path string, content []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return nil
	}
	fmt.Println(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}

// repository is the folder with our go.mod.
func repository(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	file := strings.TrimSpace(string(out))
	if file == "" || file == os.DevNull {
		return "", errors.New("not in the repository")
	}
	return filepath.Dir(file), nil
}
