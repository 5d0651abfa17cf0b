package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/tools/devcluster"
)

// installLine has the times of the steps of an installation.
var installLine = regexp.MustCompile(`(?m)^\[ *(\d+\.\d+)\] \[garboard\] install-\S+ (verify|write): (running|done)`)

// budgetInstall is the RAM in which a machine has to install itself.
const budgetInstall = 1 << 30

// benchInstall lets a machine install itself from a CD, with no more memory than a control plane needs.
func benchInstall(ctx context.Context, out io.Writer, root string) (figures []figure, err error) {
	const name = "bench-install"
	if err := qemu.Down(ctx, name); err != nil { // before its memory is watched
		return nil, err
	}
	var c *devcluster.Created
	memory, err := whileWatched(ctx, name, func() (err error) {
		c, err = installed(ctx, out, root, name, devcluster.Options{})
		return err
	})
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	if err != nil {
		return nil, err
	}
	console, err := os.ReadFile(c.Console(c.Nodes[0].Name))
	if err != nil {
		return nil, err
	}
	steps, err := installSteps(string(console))
	if err != nil {
		return nil, err
	}
	for _, s := range steps {
		figures = append(figures, figure{what: "install: " + s.name + " the system", value: seconds(s.took)})
	}
	copied, err := benchCopy(ctx, c.Cluster, steps)
	if err != nil {
		return figures, err
	}
	figures = append(figures, copied,
		memory.figure(fmt.Sprintf("install: most memory in use, of %d MiB, until the restart", controlPlaneMiB), budgetInstall),
		figure{what: "install: power-on → node Ready, from its disk, images from a registry", value: seconds(c.After)})
	restarts, err := benchRestarts(ctx, out, c.Cluster)
	if figures = append(figures, restarts...); err != nil {
		return figures, err
	}
	if err := qemu.Down(ctx, name); err != nil { // two emulated machines at a time would slow down each other
		return figures, err
	}
	others, err := benchOtherImages(ctx, out, root, c.After)
	return append(figures, others...), err
}

// installed makes a machine that installs itself from a CD.
func installed(ctx context.Context, out io.Writer, root, name string, o devcluster.Options) (*devcluster.Created, error) {
	if err := qemu.Down(ctx, name); err != nil {
		return nil, err
	}
	o.Checkout, o.Boot = root, media.ISO
	o.Cluster.Name, o.Cluster.Provisioner, o.Cluster.MemoryMiB = name, qemu.QEMU, controlPlaneMiB
	return devcluster.Create(ctx, out, o)
}

// A stepTime is how long a step of an installation took.
type stepTime struct {
	name string
	took time.Duration
}

// installSteps reads a console.
func installSteps(console string) (all []stepTime, err error) {
	began := 0.0
	for _, line := range installLine.FindAllStringSubmatch(console, -1) {
		at, err := strconv.ParseFloat(line[1], 64)
		if err != nil {
			return nil, err
		}
		if line[3] == "done" {
			all = append(all, stepTime{line[2], time.Duration((at - began) * float64(time.Second))})
		}
		began = at
	}
	if len(all) == 0 || all[len(all)-1].name != stepWrite || all[len(all)-1].took <= 0 {
		return nil, fmt.Errorf("the console has no complete step %q of an installation", stepWrite)
	}
	return all, nil
}

const stepWrite = "write"

// benchCopy compares writing the system with dd, to the disk that has the machine's.
func benchCopy(ctx context.Context, c *qemu.Cluster, steps []stepTime) (figure, error) {
	to := filepath.Join(c.Dir(), "copy")
	defer os.Remove(to)
	var took time.Duration
	// The machine has read its medium before it writes, and so has dd: the second copy counts.
	for range 2 {
		start := time.Now()
		if said, err := exec.CommandContext(ctx, "dd", "if="+c.Boot.Medium, "of="+to, "bs=4M", "conv=fsync").CombinedOutput(); err != nil {
			return figure{}, fmt.Errorf("dd: %w: %s", err, said)
		}
		took = time.Since(start)
	}
	return copyFigure(steps[len(steps)-1].took, took, c.Accelerator), nil
}

// copyFigure says what was compared: an emulated machine with a program of the computer that emulates it, or two that run at the same speed.
func copyFigure(write, dd time.Duration, accelerator string) figure {
	what := "install: write the system, against dd of the medium to a file beside the machine's disk"
	if accelerator == "tcg" {
		what += " (the machine is emulated, and dd isn't)"
	}
	return figure{what: what, value: fmt.Sprintf("%.1f × %s", write.Seconds()/max(dd.Seconds(), 0.001), seconds(dd))}
}

// benchOtherImages installs machines whose images don't come from the cluster's registry: they are on the CD, or in a registry mirror, as in a warm cache.
func benchOtherImages(ctx context.Context, out io.Writer, root string, registered time.Duration) (figures []figure, err error) {
	dir, err := os.MkdirTemp("", "garboard-bundle-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	made, err := devcluster.Build(ctx, root, out, image.Build, image.Cloud)
	if err != nil {
		return nil, err
	}
	images := filepath.Join(dir, "images.tar")
	if err := bundle(ctx, made.Layout, config.DefaultImages(), images); err != nil {
		return nil, err
	}
	source := httptest.NewServer(registry.New(made.Layout))
	defer source.Close()
	for _, from := range []struct {
		name, where string
		o           devcluster.Options
	}{
		{"bench-bundled", "the medium", devcluster.Options{Images: images}},
		{"bench-mirrored", "a registry mirror that has them (--registry-mirror)", devcluster.Options{Cluster: qemu.Options{Mirrors: map[string][]string{"*": {source.URL}}}}},
	} {
		c, err := installed(ctx, out, root, from.name, from.o)
		if err := errors.Join(err, qemu.Down(context.WithoutCancel(ctx), from.name)); err != nil {
			return figures, err
		}
		figures = append(figures, figure{
			what: "install: the same, images from " + from.where, value: fmt.Sprintf("%s, %.2f of that", seconds(c.After), float64(c.After)/float64(registered)),
		})
	}
	return figures, nil
}

// benchRestarts restarts an installed machine with its system, and then with another one.
func benchRestarts(ctx context.Context, out io.Writer, c *qemu.Cluster) ([]figure, error) {
	reboot, err := operate(ctx, out, c, func(ctx context.Context, node *client.Client) (*garboardv1.Operation, error) {
		r, err := client.Unary(ctx, node.Node.Reboot, &garboardv1.RebootRequest{})
		return r.GetOperation(), err
	})
	if err != nil {
		return nil, err
	}
	figures := []figure{
		{what: "reboot of this machine: no API server for", value: seconds(reboot.longest)},
		{what: "reboot of this machine, until the operation has ended, images on its disk", value: seconds(reboot.took)},
	}
	var upgrade operated
	memory, err := whileWatched(ctx, c.Name, func() (err error) {
		upgrade, err = operate(ctx, out, c, func(ctx context.Context, node *client.Client) (*garboardv1.Operation, error) {
			r, err := client.Unary(ctx, node.Node.UpgradeSystem, &garboardv1.UpgradeSystemRequest{Image: media.InstallerImage(boot.Version)})
			return r.GetOperation(), err
		})
		return err
	})
	if err != nil {
		return figures, err
	}
	return append(figures,
		figure{what: "upgrade of this machine: no API server for", value: fmt.Sprintf("%s, %.2f of a reboot", seconds(upgrade.longest), float64(upgrade.longest)/float64(reboot.longest))},
		figure{what: "upgrade of this machine, until it is known to be healthy", value: seconds(upgrade.took)},
		memory.figure(fmt.Sprintf("upgrade of this machine: most memory in use, of %d MiB, until the restart, with Kubernetes", controlPlaneMiB), 0),
	), nil
}
