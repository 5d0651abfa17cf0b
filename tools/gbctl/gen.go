package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/boot"
)

// generator makes files. Tests of expiry set its clock.
type generator struct {
	now   func() time.Time
	force bool
}

func genCommand() *cobra.Command { return (&generator{now: time.Now}).command() }

func (g *generator) command() *cobra.Command {
	cmd := group("gen",
		g.configCommand(), g.secretsCommand(), g.caCommand(), g.keyCommand(), g.releaseKeyCommand(), g.secureBootCommand(), g.requestCommand(), g.certificateCommand())
	cmd.PersistentFlags().BoolVar(&g.force, "force", false, "overwrite existing files")
	return cmd
}

const (
	secretMode = 0o600 // for files with private keys
	publicMode = 0o644
	// outputDirMode: most files inside are secret.
	outputDirMode = 0o700
	// maxInput limits the size of an input file, in bytes.
	maxInput = 1 << 20
)

// output is a file to write.
type output struct {
	path string
	data []byte
	mode fs.FileMode
	// replace: an existing file is overwritten, because it can be made again.
	replace bool
}

// write writes all files, or none if one of them exists.
func (g *generator) write(outputs ...output) error {
	var existing []string
	for _, o := range outputs {
		if _, err := os.Lstat(o.path); err == nil && !g.force && !o.replace {
			existing = append(existing, o.path)
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if len(existing) > 0 {
		return &exitError{codeRefused, fmt.Errorf("nothing was written, because these files exist: %s\nmove them away, or overwrite them with --force", strings.Join(existing, ", "))}
	}
	for _, o := range outputs {
		if err := os.MkdirAll(filepath.Dir(o.path), outputDirMode); err != nil {
			return err
		}
		if err := boot.WriteFile(o.path, o.data, o.mode); err != nil {
			return err
		}
	}
	return nil
}

// writeAndReport writes files, and prints what they are and what to do next.
func (g *generator) writeAndReport(out io.Writer, report string, outputs ...output) error {
	if err := g.write(outputs...); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, report)
	return err
}

// readInput reads a file of limited size.
func readInput(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxInput {
		return nil, fmt.Errorf("read %s: it has %d bytes, more than %d", path, info.Size(), maxInput)
	}
	return os.ReadFile(path)
}
