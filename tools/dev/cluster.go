package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

func clusterFlag(cmd *cobra.Command, name *string) *cobra.Command {
	cmd.Flags().StringVar(name, "cluster", devcluster.DefaultName, "name of the cluster")
	return cmd
}

func upCommand() *cobra.Command {
	var o qemu.Options
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Build everything, boot a cluster and wait until it serves",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return up(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Provisioner, "provisioner", qemu.Auto, "how nodes run: qemu, container, docker or auto")
	f.IntVar(&o.ControlPlanes, "controlplanes", 0, "how many control planes (default as many as there are, or 1)")
	f.IntVar(&o.Workers, "workers", 0, "how many workers")
	return clusterFlag(cmd, &o.Name)
}

func up(ctx context.Context, out io.Writer, o qemu.Options) error {
	root, err := prepared(ctx, out, false)
	if err != nil {
		return err
	}
	c, err := devcluster.Create(ctx, out, devcluster.Options{Checkout: root, Cluster: o})
	if err != nil {
		return err
	}
	fmt.Fprintln(out)
	if err := kubectl(ctx, c.Cluster, os.Stdin, out, "get", "nodes", "-o", "wide"); err != nil {
		return err
	}
	target := ""
	if o.Name != devcluster.DefaultName {
		target = " CLUSTER=" + o.Name
	}
	after := ""
	if c.Started {
		after = fmt.Sprintf(", %.1f s after power-on", c.After.Seconds())
	}
	fmt.Fprintf(out, `
Cluster %s serves%s.
  gbctl     export GARBOARDCONFIG=%[5]q; out/gbctl services
  kubectl   make kubectl%[3]s ARGS='get pods -A'   (or: export KUBECONFIG=%[4]q)
  console   make console%[3]s
  chart     make chart%[3]s
  remove    make down%[3]s
`, o.Name, after, target, c.Kubeconfig(), c.ClientConfig())
	return nil
}

func downCommand() *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
		Use:   "down",
		Short: "Stop a cluster and remove all of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			existed, err := devcluster.Destroy(cmd.Context(), name)
			switch {
			case err != nil:
				return err
			case existed:
				fmt.Fprintf(cmd.OutOrStdout(), "Cluster %s is gone.\n", name)
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "There is no cluster %s.\n", name)
			}
			return nil
		},
	}, &name)
}

// clusterCommand makes a command for a cluster that exists.
func clusterCommand(use, short string, args cobra.PositionalArgs, do func(cmd *cobra.Command, c *qemu.Cluster, args []string) error) *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
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
	}, &name)
}

func kubectlCommand() *cobra.Command {
	return clusterCommand("kubectl -- ARGS", "kubectl against a cluster", nil, func(cmd *cobra.Command, c *qemu.Cluster, args []string) error {
		return kubectl(cmd.Context(), c, os.Stdin, cmd.OutOrStdout(), args...)
	})
}

// kubectl runs the one that was built with the cluster.
func kubectl(ctx context.Context, c *qemu.Cluster, in io.Reader, out io.Writer, args ...string) error {
	root, err := repository()
	if err != nil {
		return err
	}
	made, err := image.BuildComponents(ctx, root, os.Stderr, "kubernetes")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(made["kubernetes"], "kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exitCode(max(exit.ExitCode(), 1))
	}
	return err
}

// hostCommand is the process that holds a cluster; up starts it.
func hostCommand() *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
		Use:    "host",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return qemu.Host(cmd.Context(), name, slog.New(slog.NewTextHandler(os.Stderr, nil)))
		},
	}, &name)
}
