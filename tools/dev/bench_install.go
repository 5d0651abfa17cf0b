package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
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
	return append(figures, figure{what: "install: power-on → node Ready, from its disk", value: seconds(c.After)}), nil
}
