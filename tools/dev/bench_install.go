package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
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
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
)

// installLine has the times of the steps of an installation.
var installLine = regexp.MustCompile(`(?m)^\[ *(\d+\.\d+)\] \[garboard\] install-\S+ (verify|write): (running|done)`)

// benchInstall lets a machine install itself from a CD, with no more memory than a control plane needs.
func benchInstall(ctx context.Context, out io.Writer, root string) (figures []figure, err error) {
	const name = "bench-install"
	if err := qemu.Down(ctx, name); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	c, err := devcluster.Create(ctx, out, devcluster.Options{
		Checkout: root, Boot: media.ISO, Cluster: qemu.Options{Name: name, Provisioner: qemu.QEMU, MemoryMiB: controlPlaneMiB},
	})
	if err != nil {
		return nil, err
	}
	console, err := os.ReadFile(c.Console(c.Nodes[0].Name))
	if err != nil {
		return nil, err
	}
	began := 0.0
	for _, line := range installLine.FindAllStringSubmatch(string(console), -1) {
		at, err := strconv.ParseFloat(line[1], 64)
		if err != nil {
			return nil, err
		}
		if line[3] == "done" {
			figures = append(figures, figure{what: "install: " + line[2] + " the system", value: fmt.Sprintf("%.1f s", at-began)})
		}
		began = at
	}
	figures = append(figures, figure{what: "install: power-on → node Ready, from its disk, images from a registry", value: seconds(c.After)})
	restarts, err := benchRestarts(ctx, out, c.Cluster)
	if err != nil {
		return figures, err
	}
	bundled, err := benchBundled(ctx, out, root)
	figures = append(append(figures, restarts...), figure{
		what: "install: the same, images from the medium", value: fmt.Sprintf("%s, %.2f of that", seconds(bundled), float64(bundled)/float64(c.After)),
	})
	return figures, err
}

// benchBundled is an installation from a CD that has the images.
func benchBundled(ctx context.Context, out io.Writer, root string) (_ time.Duration, err error) {
	const name = "bench-bundled"
	dir, err := os.MkdirTemp("", "garboard-bundle-")
	if err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name), os.RemoveAll(dir))
	}()
	made, err := devcluster.Build(ctx, root, out, image.Build, image.Cloud)
	if err != nil {
		return 0, err
	}
	source := httptest.NewServer(registry.New(made.Layout))
	defer source.Close()
	bundle := filepath.Join(dir, "images.tar")
	pulls := imagebundle.Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {source.URL}}}
	if err := pulls.Write(ctx, config.DefaultImages(), bundle); err != nil {
		return 0, err
	}
	c, err := devcluster.Create(ctx, out, devcluster.Options{
		Checkout: root, Boot: media.ISO, Images: bundle, Cluster: qemu.Options{Name: name, Provisioner: qemu.QEMU, MemoryMiB: controlPlaneMiB},
	})
	if err != nil {
		return 0, err
	}
	return c.After, nil
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
	upgrade, err := operate(ctx, out, c, func(ctx context.Context, node *client.Client) (*garboardv1.Operation, error) {
		r, err := client.Unary(ctx, node.Node.UpgradeSystem, &garboardv1.UpgradeSystemRequest{Image: media.InstallerImage(boot.Version)})
		return r.GetOperation(), err
	})
	return []figure{
		{what: "reboot of this machine: no API server for", value: seconds(reboot.longest)},
		{what: "reboot of this machine, until the operation has ended, images on its disk", value: seconds(reboot.took)},
		{what: "upgrade of this machine: no API server for", value: fmt.Sprintf("%s, %.2f of a reboot", seconds(upgrade.longest), float64(upgrade.longest)/float64(reboot.longest))},
		{what: "upgrade of this machine, until it is known to be healthy", value: seconds(upgrade.took)},
	}, err
}
