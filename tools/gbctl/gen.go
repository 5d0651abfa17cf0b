package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/boot"
)

const genLong = `gen makes files on this computer and asks no node: the configurations of a new
cluster, secrets, keys and certificates.

A file that exists is never overwritten, unless --force is given. What can be made
again from what is beside it, a certificate request or the certificate of a key,
is replaced.`

// generator makes files. Its clock is a field for tests of what expires.
type generator struct {
	now   func() time.Time
	force bool
}

func genCommand() *cobra.Command { return (&generator{now: time.Now}).command() }

func (g *generator) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gen",
		Short: "Make configurations, secrets, keys and certificates",
		Long:  genLong,
		// Without these two, a misspelt subcommand would show the help and succeed.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().BoolVar(&g.force, "force", false, "overwrite files that exist")
	cmd.AddCommand(g.configCommand(), g.secretsCommand(), g.caCommand(), g.keyCommand(), g.requestCommand(), g.certificateCommand())
	return cmd
}

const (
	secretMode = 0o600 // keys, and whatever holds one
	publicMode = 0o644
	// outputDirMode: what is inside is mostly secret.
	outputDirMode = 0o700
	// maxInput bounds a file that is read, in bytes: none of them comes near it.
	maxInput = 1 << 20
)

// output is a file to write.
type output struct {
	path string
	data []byte
	mode fs.FileMode
	// replace says that the file may be there: it can be made again any time.
	replace bool
}

// write writes all files, or none where one is in the way.
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
		return &exitError{codeRefused, fmt.Errorf("nothing was written, because it exists: %s\nmove it away, or overwrite it with --force", strings.Join(existing, ", "))}
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

// readInput reads a file of bounded size.
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
