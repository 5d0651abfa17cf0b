// Package devcluster starts development clusters for gbctl and for the developers' tool:
// it builds missing parts, starts the nodes, waits until the cluster is ready, and prints
// the progress.
package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/selfhosted"
	"github.com/garboard-os/garboard/qemu/vm"
)

// DefaultName is the default name of a cluster.
const DefaultName = "garboard-default"

// Options are the options of Create.
type Options struct {
	// Checkout is the source from which the parts are built.
	Checkout string
	// Cluster has the options of the cluster. Create sets Boot, Images, Kubernetes and Out.
	Cluster qemu.Options
	// Boot is a kind of media: nodes in QEMU boot from it, with firmware and boot loader. "": QEMU loads their kernel.
	// An existing cluster keeps its own.
	Boot string
	// UEFI gives nodes in QEMU this firmware instead of a BIOS.
	UEFI bool
	// Wait limits the time until the cluster is ready; 0: see ReadyBudgets.
	Wait time.Duration
}

// Created is a cluster that is ready.
type Created struct {
	*qemu.Cluster
	// After is the time from power-on, if the cluster didn't run before.
	After time.Duration
}

// Create starts a new or an existing cluster. If it can't start, or Create is
// interrupted, the state is restored. A cluster that starts but isn't ready in time is
// kept for inspection. Only a new cluster can get a self-hosted control plane.
func Create(ctx context.Context, out io.Writer, o Options) (*Created, error) {
	q := o.Cluster
	// Check this before the build, which can take long.
	old, err := qemu.Open(q.Name)
	switch {
	case errors.Is(err, qemu.ErrNoCluster):
		old = &qemu.Cluster{}
		q.Choice, err = qemu.Choose(ctx, q.Provisioner)
	case err == nil && q.SelfHosted:
		err = existsError(q.Name)
	case err == nil:
		q.Choice = qemu.Choice{Name: old.Provisioner, Accelerator: old.Accelerator, Why: "the cluster exists"}
		o.Boot, o.UEFI = bootOf(old.Boot), old.Boot.UEFI
	}
	if err != nil {
		return nil, err
	}
	q.Kubernetes = furtherKubernetes(q.KubernetesVersion, old)
	if o.Boot == media.PXE && q.InstallImage == "" {
		q.InstallImage = media.InstallerImage(boot.Version)
	}
	optional := q.Kubernetes
	if q.SelfHosted || old.SelfHosted {
		optional = append(slices.Clone(optional), components.PodCheckpointer)
	}
	if err := qemu.Check(q); err != nil {
		return nil, err
	}
	node := image.Build
	if q.Choice.Name != qemu.QEMU {
		node = image.BuildRoot
		if o.Boot != "" || o.UEFI {
			return nil, errors.New("containers have no firmware: use --provisioner qemu")
		}
	}
	made, err := Build(ctx, o.Checkout, out, node, image.Cloud, optional...)
	if err != nil {
		return nil, err
	}
	if q.Boot, err = o.bootFrom(func(flavour image.Flavour, kind string) (string, error) {
		return image.BuildMedium(ctx, o.Checkout, out, flavour, kind, slices.Concat(mediumArgs, vm.KernelArgs(q.Choice.Accelerator))...)
	}); err != nil {
		return nil, err
	}
	start := time.Now()
	c, err := up(ctx, out, q, made)
	if err != nil {
		return nil, err
	}
	if q.SelfHosted && !c.Made {
		return nil, existsError(q.Name) // another command has just made it
	}
	fmt.Fprintln(out, "waiting for API")
	err = awaitReady(ctx, out, c, start, o.Wait)
	if err == nil && q.SelfHosted {
		err = selfhosted.Convert(ctx, c, out)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, undo(context.WithoutCancel(ctx), out, c))
		}
		return nil, err
	}
	return &Created{Cluster: c, After: time.Since(start)}, nil
}

func existsError(name string) error {
	return fmt.Errorf("cluster %s exists: only the control plane of a new cluster can be made self-hosted; remove it with 'gbctl cluster destroy --name %s', or take another name", name, name)
}

// Build builds the parts that aren't in the cache, with these optional components
// (components.Names), and prints the duration.
func Build(ctx context.Context, checkout string, out io.Writer, node image.Builder, flavour image.Flavour, optional ...string) (*image.Artifacts, error) {
	start := time.Now()
	made, err := image.BuildAll(ctx, checkout, out, node, flavour, optional...)
	if err == nil {
		fmt.Fprintf(out, "built in %s\n", time.Since(start).Round(100*time.Millisecond))
	}
	return made, err
}

// mediumArgs are the kernel arguments of nodes in QEMU that boot from a medium. The serial line is their console.
var mediumArgs = []string{"console=ttyS0", "panic=-1", "garboard.chart=/dev/ttyS1"}

// bootFrom has what nodes boot from, and the installer image, built.
func (o Options) bootFrom(build func(image.Flavour, string) (string, error)) (b qemu.Boot, err error) {
	b.UEFI = o.UEFI
	if o.Boot == "" {
		return b, nil
	}
	flavour := image.Cloud
	if o.Boot == media.ISO {
		flavour = image.Generic // the smaller kernel has no driver for AHCI, where the CD drive is
	}
	to := map[string]*string{media.ISO: &b.Medium, media.Disk: &b.Disk, media.PXE: &b.Network}[o.Boot]
	if *to, err = build(flavour, o.Boot); err == nil {
		b.Installer, err = build(flavour, media.InstallerKind)
	}
	return b, err
}

// bootOf is the option with which a cluster was made.
func bootOf(b qemu.Boot) string {
	switch {
	case b.Medium != "":
		return media.ISO
	case b.Disk != "":
		return media.Disk
	case b.Network != "":
		return media.PXE
	}
	return ""
}

// up starts a cluster with what was built.
func up(ctx context.Context, out io.Writer, o qemu.Options, made *image.Artifacts) (*qemu.Cluster, error) {
	o.Boot.Kernel, o.Boot.Initramfs, o.Boot.Rootfs, o.Boot.Init, o.Boot.Sandbox = made.Kernel, made.Initramfs, made.RootFS, made.Init, made.Sandbox
	o.Images, o.Out = made.Layout, out
	return qemu.Up(ctx, o)
}

// furtherKubernetes returns the versions of Kubernetes to build besides the default one: a
// version, and what the registry of an existing cluster has.
func furtherKubernetes(version string, existing *qemu.Cluster) []string {
	wanted := append([]string{"v" + strings.TrimPrefix(version, "v")}, existing.Kubernetes...)
	return slices.DeleteFunc(components.KubernetesVersions()[1:], func(version string) bool { return !slices.Contains(wanted, version) })
}

// undo restores the state before Create. It doesn't change a cluster that another command
// has made or started in the meantime.
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
		// After Ctrl-C, gbctl prints no other error.
		fmt.Fprintf(out, "This failed; parts of the cluster may still run: %v\n'gbctl cluster destroy --name %s' removes it.\n", err, c.Name)
	}
	return err
}

// Destroy removes a cluster with all its data, and reports whether it existed. It also
// removes the remains of a cluster whose host process was killed.
func Destroy(ctx context.Context, name string) (existed bool, err error) {
	_, opened := qemu.Open(name)
	return !errors.Is(opened, qemu.ErrNoCluster), qemu.Down(ctx, name)
}
