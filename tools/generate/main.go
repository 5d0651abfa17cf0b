// Command generate writes what is made from other files of the repository and
// committed beside them: the Go code of the machine API, the schema of the
// configuration and its reference page. It needs nothing but Go.
//
//	go run ./tools/generate
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
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
	for _, g := range generators {
		files, err := g.make(context.Background(), ".")
		for path, content := range files {
			err = errors.Join(err, write(path, content))
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "generate: %s: %v\n", g.name, err)
			os.Exit(1)
		}
	}
}

// write leaves a file that is right as it is, so that nothing is built anew.
func write(path string, content []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return nil
	}
	fmt.Println(path)
	return os.WriteFile(path, content, 0o644)
}
