package main

import (
	"crypto/x509"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/image/secureboot"
)

// secureBootCommand makes the keys of whoever owns machines.
func (g *generator) secureBootCommand() *cobra.Command {
	var dir string
	var added []string
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
		files, err := secureboot.Generate(g.now(), certs...)
		if err != nil {
			return err
		}
		var outputs []output
		for _, name := range slices.Sorted(maps.Keys(files)) {
			o := output{path: filepath.Join(dir, name), data: files[name], mode: publicMode}
			if filepath.Ext(name) == ".key" {
				o.mode = secretMode
			}
			outputs = append(outputs, o)
		}
		report := fmt.Sprintf("wrote the keys to %s\nnext: gbctl image build --from INSTALLER --sign %s --kind iso, and keep a copy of the directory offline", dir, shellWord(dir))
		return g.writeAndReport(cmd.OutOrStdout(), report, outputs...)
	})
	cmd.Flags().StringVar(&dir, "output-dir", "secureboot", "directory for the files")
	cmd.Flags().StringArrayVar(&added, "db", nil, "file with a certificate that the firmware is to trust, too, in PEM or DER; repeatable")
	return cmd
}
