package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/config"
)

const secretsLong = `Make the secrets that the nodes of a cluster share: authorities, tokens and keys.
'gbctl gen config --with-secrets' makes configurations from them, always for the same
cluster.

--from-kubernetes-pki takes the authorities of an existing Kubernetes cluster, from the
directory in which kubeadm keeps them (/etc/kubernetes/pki):

  ca.crt ca.key front-proxy-ca.crt front-proxy-ca.key
  etcd/ca.crt etcd/ca.key sa.key

In this case there is no cluster.secret, which encrypts Secrets in etcd: the old API
servers couldn't read them. After the last old API server is removed, add one: 32
random bytes in base64.`

func (g *generator) secretsCommand() *cobra.Command {
	var path, from string
	cmd := &cobra.Command{
		Use:     "secrets",
		Short:   "Make the secrets of a cluster: secrets.yaml",
		Long:    secretsLong,
		Example: "  gbctl gen secrets\n  gbctl gen secrets --from-kubernetes-pki /etc/kubernetes/pki -o old.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := g.secrets(from)
			if err != nil {
				return err
			}
			data, err := s.Encode()
			if err != nil {
				return err
			}
			if err := g.write(output{path: path, data: data, mode: secretMode}); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "wrote %s\nnext: gbctl gen config NAME ENDPOINT --with-secrets %s\n", path, path)
			return nil
		},
	}
	cmd.Flags().StringVarP(&path, "output", "o", "secrets.yaml", "file to write")
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
