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
	"sync"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/spf13/cobra"
)

const (
	defaultCluster = "garboard-default"

	// How long a cluster may take to serve, from power-on. Emulated nodes run ten
	// times slower; both leave room for a busy machine.
	readyBudget         = 3 * time.Minute
	readyBudgetEmulated = 20 * time.Minute

	// patience is how often up says what it waits for.
	patience = 5 * time.Second
)

func clusterFlag(cmd *cobra.Command, name *string) *cobra.Command {
	cmd.Flags().StringVar(name, "cluster", defaultCluster, "name of the cluster")
	return cmd
}

func upCommand() *cobra.Command {
	var name, provisioner string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Build everything, boot a one-node cluster and wait until it serves",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return up(cmd.Context(), cmd.OutOrStdout(), name, provisioner)
		},
	}
	cmd.Flags().StringVar(&provisioner, "provisioner", qemu.Auto, "how nodes run: qemu, container or auto")
	return clusterFlag(cmd, &name)
}

func up(ctx context.Context, out io.Writer, name, provisioner string) error {
	root, err := repository()
	if err != nil {
		return err
	}
	if err := setup(ctx, out, false); err != nil {
		return err
	}
	// Before the build, so that nobody waits for one only to hear that nodes can't run here.
	choice, err := choose(ctx, name, provisioner)
	if err != nil {
		return err
	}
	boot := image.Build
	if choice.Name == qemu.Container {
		boot = image.BuildRoot
	}
	made, err := build(ctx, root, out, boot)
	if err != nil {
		return err
	}
	before, err := look(name)
	if err != nil {
		return err
	}
	start := time.Now()
	c, err := bootWith(ctx, out, name, provisioner, made, func(o *qemu.Options) { o.Choice = choice })
	if err != nil {
		return err
	}
	if err := awaitReady(ctx, out, c, start, nil); err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, before.restore(context.WithoutCancel(ctx), out))
		}
		return err
	}
	fmt.Fprintln(out)
	if err := kubectl(ctx, c, os.Stdin, out, "get", "nodes", "-o", "wide"); err != nil {
		return err
	}
	target := ""
	if name != defaultCluster {
		target = " CLUSTER=" + name
	}
	after := ""
	if !before.running {
		after = fmt.Sprintf(", %.1f s after power-on", time.Since(start).Seconds())
	}
	fmt.Fprintf(out, `
Cluster %s serves%s.
  gbctl     export GARBOARDCONFIG=%[5]s; out/gbctl services
  kubectl   make kubectl%[3]s ARGS='get pods -A'   (or: export KUBECONFIG=%[4]s)
  console   make console%[3]s
  chart     make chart%[3]s
  remove    make down%[3]s
`, name, after, target, c.Kubeconfig(), c.ClientConfig())
	return nil
}

// choose says how a cluster's nodes are going to run: as they do already, or as
// this machine lets new ones.
func choose(ctx context.Context, name, provisioner string) (qemu.Choice, error) {
	c, err := qemu.Open(name)
	if errors.Is(err, qemu.ErrNoCluster) {
		return qemu.Choose(ctx, provisioner)
	}
	if err != nil {
		return qemu.Choice{}, err
	}
	return qemu.Choice{Name: c.Provisioner, Accelerator: c.Accelerator, Why: "the cluster exists"}, nil
}

// condition is how a cluster was before up, which is how Ctrl-C leaves it.
type condition struct {
	name             string
	existed, running bool
}

func look(name string) (condition, error) {
	c, err := qemu.Open(name)
	if errors.Is(err, qemu.ErrNoCluster) {
		return condition{name: name}, nil
	} else if err != nil {
		return condition{}, err
	}
	pid, err := c.HostPID()
	return condition{name: name, existed: true, running: pid != 0}, err
}

func (b condition) restore(ctx context.Context, out io.Writer) error {
	switch {
	case !b.existed:
		fmt.Fprintf(out, "\nInterrupted: removing cluster %s.\n", b.name)
		return qemu.Down(ctx, b.name)
	case !b.running:
		fmt.Fprintf(out, "\nInterrupted: stopping cluster %s.\n", b.name)
		return qemu.Stop(ctx, b.name)
	}
	return nil
}

// bootWith starts the cluster with what was built; change, if any, has the last
// word about how.
func bootWith(ctx context.Context, out io.Writer, name, provisioner string, made *image.Artifacts, change func(*qemu.Options)) (*qemu.Cluster, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	o := qemu.Options{
		Name:        name,
		Provisioner: provisioner,
		Boot:        qemu.Boot{Kernel: made.Kernel, Initramfs: made.Initramfs, Rootfs: made.RootFS, Init: made.Init, Sandbox: made.Sandbox},
		Images:      made.Layout,
		Self:        []string{self},
		Out:         out,
	}
	if change != nil {
		change(&o)
	}
	return qemu.Up(ctx, o)
}

// awaitReady tells what is reached and, in between, what it waits for. reached,
// if any, hears of each milestone too.
func awaitReady(ctx context.Context, out io.Writer, c *qemu.Cluster, start time.Time, reached func(qemu.Milestone)) error {
	budget := readyBudget
	if c.Accelerator == "tcg" {
		budget = readyBudgetEmulated
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	var mu sync.Mutex // guards said
	said := time.Now()
	err := c.WaitReady(ctx,
		func(m qemu.Milestone) {
			fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(start).Seconds(), m.What)
			if reached != nil {
				reached(m)
			}
		},
		func(why error) {
			mu.Lock()
			defer mu.Unlock()
			if time.Since(said) < patience {
				return
			}
			said = time.Now()
			fmt.Fprintf(out, "%6.1fs  … %s\n", time.Since(start).Seconds(), oneLine(waitingFor(c, why)))
		})
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w\nThe console tells more: make console CLUSTER=%s", err, c.Name)
	}
	return err
}

// waitingFor prefers the node's own words to a refused connection.
func waitingFor(c *qemu.Cluster, why error) string {
	if !errors.Is(why, syscall.ECONNREFUSED) && !errors.Is(why, io.EOF) && !errors.Is(why, syscall.ECONNRESET) {
		return why.Error()
	}
	if line := lastSaid(c.Console(c.Nodes[0].Name)); line != "" {
		return line
	}
	return "the node boots"
}

func downCommand() *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
		Use:   "down",
		Short: "Stop a cluster and remove all of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := qemu.Open(name)
			if errors.Is(err, qemu.ErrNoCluster) {
				fmt.Fprintf(cmd.OutOrStdout(), "There is no cluster %s.\n", name)
			}
			// Also then: what a killed one left is removed.
			if err := qemu.Down(cmd.Context(), name); err != nil {
				return err
			}
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "Cluster %s is gone.\n", name)
			}
			return nil
		},
	}, &name)
}

func kubectlCommand() *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
		Use:   "kubectl -- ARGS",
		Short: "kubectl against a cluster",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := qemu.Open(name)
			if err != nil {
				return hint(err, name)
			}
			return kubectl(cmd.Context(), c, os.Stdin, cmd.OutOrStdout(), args...)
		},
	}, &name)
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
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		return exitCode(max(exit.ExitCode(), 1))
	} else if err != nil {
		return err
	}
	return nil
}

func hint(err error, name string) error {
	if errors.Is(err, qemu.ErrNoCluster) {
		return fmt.Errorf("there is no cluster %s; make one with: make up", name)
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

// dialCommand joins a QEMU guest's connection to an address of this machine.
func dialCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "dial ADDRESS",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE:   func(cmd *cobra.Command, args []string) error { return qemu.Dial(cmd.Context(), args[0]) },
	}
}
