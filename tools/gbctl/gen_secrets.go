package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/config"
)

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
		return nil, &exitError{codeRefused, fmt.Errorf("secrets from %s:\n%w", from, err)}
	}
	return s, nil
}
