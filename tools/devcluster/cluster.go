// Package devcluster is the one way to bring a development cluster up: build what
// isn't built yet, start the nodes, wait until they serve, and tell all the while
// what happens. gbctl and the developers' tool both do it so.
package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
)

// DefaultName is that of the cluster that is meant when none is named.
const DefaultName = "garboard-default"

// Options say what Create creates.
type Options struct {
	// Checkout is where what nodes boot is built from.
	Checkout string
	// Cluster is what it is like. Boot, Images and Out are filled in.
	Cluster qemu.Options
	// Wait is how long it may take to serve; 0: ReadyBudget and more.
	Wait time.Duration
}

// A Created cluster serves.
type Created struct {
	*qemu.Cluster
	// After is how long it took from power-on, if it didn't run before.
	After time.Duration
}

// Create brings a cluster up, a new one or one that exists. What can't be brought
// up, or is interrupted, is left as it was before; one that starts and then doesn't
// serve in time stays, to be looked into.
func Create(ctx context.Context, out io.Writer, o Options) (*Created, error) {
	q := o.Cluster
	// Before the build, so that nobody waits for one only to hear that this can't be.
	var err error
	if q.Choice, err = choose(ctx, q); err != nil {
		return nil, err
	}
	if err := qemu.Check(q); err != nil {
		return nil, err
	}
	node := image.Build
	if q.Choice.Name == qemu.Container {
		node = image.BuildRoot
	}
	made, err := Build(ctx, o.Checkout, out, node)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	c, err := Start(ctx, out, q, made)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(out, "waiting for API")
	if err := AwaitReady(ctx, out, c, start, o.Wait, nil); err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, undo(context.WithoutCancel(ctx), out, c))
		}
		return nil, err
	}
	return &Created{Cluster: c, After: time.Since(start)}, nil
}

// Checkout is the one that dir is in.
func Checkout(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "image", "components")); err == nil {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("%s isn't inside a checkout of Garboard", dir)
		}
	}
}

// Build makes what isn't in the cache yet, and says how long that took.
func Build(ctx context.Context, checkout string, out io.Writer, node image.Builder) (*image.Artifacts, error) {
	start := time.Now()
	made, err := image.BuildAll(ctx, checkout, out, node, image.Cloud)
	if err == nil {
		fmt.Fprintf(out, "built in %s\n", time.Since(start).Round(100*time.Millisecond))
	}
	return made, err
}

// Start starts a cluster with what was built.
func Start(ctx context.Context, out io.Writer, o qemu.Options, made *image.Artifacts) (*qemu.Cluster, error) {
	if len(o.Self) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		o.Self = []string{self}
	}
	o.Boot = qemu.Boot{Kernel: made.Kernel, Initramfs: made.Initramfs, Rootfs: made.RootFS, Init: made.Init, Sandbox: made.Sandbox}
	o.Images, o.Out = made.Layout, out
	return qemu.Up(ctx, o)
}

// choose says how a cluster's nodes are going to run: as they do already, or as
// this machine lets new ones.
func choose(ctx context.Context, o qemu.Options) (qemu.Choice, error) {
	c, err := qemu.Open(o.Name)
	if errors.Is(err, qemu.ErrNoCluster) {
		return qemu.Choose(ctx, o.Provisioner)
	}
	if err != nil {
		return qemu.Choice{}, err
	}
	return qemu.Choice{Name: c.Provisioner, Accelerator: c.Accelerator, Why: "the cluster exists"}, nil
}

// undo leaves a cluster as it was before Create: one that another command made
// meanwhile, or started, is left alone.
func undo(ctx context.Context, out io.Writer, c *qemu.Cluster) error {
	var err error
	switch {
	case c.Made:
		fmt.Fprintf(out, "\nInterrupted: removing cluster %s.\n", c.Name)
		err = qemu.Down(ctx, c.Name)
	case c.Started:
		fmt.Fprintf(out, "\nInterrupted: stopping cluster %s.\n", c.Name)
		err = qemu.Stop(ctx, c.Name)
	}
	if err != nil {
		// Who has pressed Ctrl-C is told of nothing else.
		fmt.Fprintf(out, "This failed, and what is left of the cluster may still run: %v\n'gbctl cluster destroy --name %s' removes it.\n", err, c.Name)
	}
	return err
}

// Destroy removes a cluster with all that it has, and says whether there was one. It
// does so too with what a killed one left.
func Destroy(ctx context.Context, name string) (existed bool, err error) {
	_, opened := qemu.Open(name)
	return !errors.Is(opened, qemu.ErrNoCluster), qemu.Down(ctx, name)
}
