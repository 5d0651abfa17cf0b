package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/secureboot"
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
		return exitf(codeRefused, "nothing was written, because these files exist: %s\nmove them away, or overwrite them with --force", strings.Join(existing, ", "))
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

func (g *generator) secretsCommand() *cobra.Command {
	var path, from string
	cmd := command("secrets", func(cmd *cobra.Command, _ []string) error {
		s, err := g.secrets(from)
		if err != nil {
			return err
		}
		data, err := s.Encode()
		if err != nil {
			return err
		}
		report := fmt.Sprintf("wrote %s\nnext: gbctl gen config NAME ENDPOINT --with-secrets %s", path, shellWord(path))
		return g.writeAndReport(cmd.OutOrStdout(), report, output{path: path, data: data, mode: secretMode})
	})
	cmd.Flags().StringVarP(&path, outputFile, "O", "secrets.yaml", "file to write")
	renamed(cmd, "output", "o", outputFile)
	cmd.Flags().StringVar(&from, "from-kubernetes-pki", "", "directory with the authorities of an existing Kubernetes cluster")
	return cmd
}

func (g *generator) secrets(from string) (*config.Secrets, error) {
	if from == "" {
		return config.NewSecrets(g.now())
	}
	s, err := config.KubernetesSecrets(os.DirFS(from), g.now())
	if err != nil {
		return nil, exitf(codeRefused, "secrets from %s:\n%w", from, err)
	}
	return s, nil
}

// secureBootCommand makes the keys of whoever owns machines.
func (g *generator) secureBootCommand() *cobra.Command {
	var dir string
	var added []string
	var tokens map[string]string
	cmd := command("secureboot", func(cmd *cobra.Command, _ []string) error {
		var certs []*x509.Certificate
		for _, file := range added {
			data, err := readInput(file)
			if err != nil {
				return err
			}
			c, err := secureboot.Certificate(data)
			if err != nil {
				return fmt.Errorf("--db: %s: %w", file, err)
			}
			certs = append(certs, c)
		}
		files, err := secureboot.Generate(g.now(), tokens, certs...)
		if err != nil {
			return err
		}
		modes := map[string]fs.FileMode{".key": secretMode, ".crt": publicMode, ".auth": publicMode, ".pub": publicMode}
		var outputs []output
		for _, name := range slices.Sorted(maps.Keys(files)) {
			outputs = append(outputs, output{path: filepath.Join(dir, name), data: files[name], mode: modes[filepath.Ext(name)]})
		}
		report := fmt.Sprintf("wrote the keys to %s\nnext: gbctl image build --from INSTALLER --sign %s --kind iso, and keep a copy of the directory offline", dir, shellWord(dir))
		return g.writeAndReport(cmd.OutOrStdout(), report, outputs...)
	})
	cmd.Flags().StringVar(&dir, "output-dir", "secureboot", "directory for the files")
	cmd.Flags().StringArrayVar(&added, "db", nil, "file with a certificate that the firmware is to trust, too, in PEM or DER; repeatable")
	cmd.Flags().StringToStringVar(&tokens, "pkcs11", nil, "NAME=URI of a key that a token has already (PK, KEK, db or pcr; RFC 7512): only a certificate is made for it; repeatable")
	return cmd
}
