package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

// clusterCommand makes a command for a cluster that exists.
func clusterCommand(use, short string, args cobra.PositionalArgs, do func(cmd *cobra.Command, c *qemu.Cluster, args []string) error) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  args,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := qemu.Open(name)
			if errors.Is(err, qemu.ErrNoCluster) {
				err = fmt.Errorf("there is no cluster %s; make one with: make up", name)
			}
			if err != nil {
				return err
			}
			return do(cmd, c, args)
		},
	}
	cmd.Flags().StringVar(&name, "cluster", devcluster.DefaultName, "name of the cluster")
	return cmd
}

// kubectlCommand runs the one that was built with the cluster.
func kubectlCommand() *cobra.Command {
	return clusterCommand("kubectl -- ARGS", "kubectl against a cluster", nil, func(cmd *cobra.Command, c *qemu.Cluster, args []string) error {
		root, err := repository()
		if err != nil {
			return err
		}
		made, err := image.BuildComponents(cmd.Context(), root, os.Stderr, "kubernetes")
		if err != nil {
			return err
		}
		kubectl := exec.CommandContext(cmd.Context(), filepath.Join(made["kubernetes"], "kubectl"), args...)
		kubectl.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
		kubectl.Stdin, kubectl.Stdout, kubectl.Stderr = os.Stdin, cmd.OutOrStdout(), os.Stderr
		err = kubectl.Run()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return exitCode(max(exit.ExitCode(), 1))
		}
		return err
	})
}
