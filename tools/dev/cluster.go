package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

// kubectlCommand becomes the kubectl that was built with the cluster.
func kubectlCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "kubectl -- ARGS",
		Short: "kubectl against a cluster",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := qemu.Open(name)
			if errors.Is(err, qemu.ErrNoCluster) {
				err = fmt.Errorf("there is no cluster %s; make one with: make up", name)
			}
			if err != nil {
				return err
			}
			root, err := repository()
			if err != nil {
				return err
			}
			made, err := image.BuildComponents(cmd.Context(), root, os.Stderr, "kubernetes")
			if err != nil {
				return err
			}
			kubectl := filepath.Join(made["kubernetes"], "kubectl")
			// Of two in an environment, the first one counts.
			if err := os.Setenv("KUBECONFIG", c.Kubeconfig()); err != nil {
				return err
			}
			return syscall.Exec(kubectl, append([]string{"kubectl"}, args...), os.Environ())
		},
	}
	cmd.Flags().StringVar(&name, "cluster", devcluster.DefaultName, "name of the cluster")
	return cmd
}

// pause waits, and is an error where the context ends before.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
