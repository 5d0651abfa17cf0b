//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/distribution/reference"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/spf13/cobra"
)

func (a *app) clusterLoadCommand() *cobra.Command {
	var cluster string
	return nameFlag(command("load IMAGE|FILE...", func(cmd *cobra.Command, args []string) error {
		c, err := openRunning(cluster)
		if err != nil {
			return err
		}
		for _, from := range args {
			if err := a.clusterLoad(cmd.Context(), c, from); err != nil {
				return err
			}
		}
		return nil
	}), &cluster)
}

// clusterLoad gives an image to the cluster, and has all nodes take it in place of the one that they have.
func (a *app) clusterLoad(ctx context.Context, c *qemu.Cluster, from string) (err error) {
	file, done, err := fromDocker(ctx, from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	var image string
	bundle := imagebundle.Bundle{Say: func(line string) { fmt.Fprintln(a.notes(), line) }}
	err = bundle.Image(ctx, file, func(called string, content v1.Image) error {
		named, err := reference.ParseDockerRef(called)
		if err != nil {
			return fmt.Errorf("%s: the image needs a name with a tag, for pods to ask for (docker tag): %w", from, err)
		}
		ref, err := name.NewTag(named.String())
		if err != nil {
			return fmt.Errorf("%s: a name with a digest is that of one registry; name a tag: %w", from, err)
		}
		image = named.String()
		return c.Load(ctx, ref, content)
	})
	if err != nil {
		return err
	}
	nodes := &app{in: a.in, out: a.out, err: a.err, timeout: a.timeout, quiet: a.quiet, configPath: c.ClientConfig()}
	return nodes.sequential(ctx, func(ctx context.Context, c *client.Client) error {
		return nodes.pullImage(ctx, c, &apiv1.PullImageRequest{Image: image, Kubernetes: true, Again: true})
	})
}

// fromDocker is a file with an image of the Docker of this machine, until done is called. What Docker doesn't have
// stays as it is.
func fromDocker(ctx context.Context, image string) (file string, done func() error, err error) {
	none := func() error { return nil }
	if _, err := os.Stat(image); !errors.Is(err, fs.ErrNotExist) || exec.CommandContext(ctx, "docker", "image", "inspect", image).Run() != nil {
		return image, none, nil
	}
	dir, err := os.MkdirTemp("", "gbctl-load-*")
	if err != nil {
		return "", none, err
	}
	file = filepath.Join(dir, "image.tar")
	if out, err := exec.CommandContext(ctx, "docker", "image", "save", "--output", file, image).CombinedOutput(); err != nil {
		return "", none, errors.Join(fmt.Errorf("docker image save %s: %w: %s", image, err, out), os.RemoveAll(dir))
	}
	return file, func() error { return os.RemoveAll(dir) }, nil
}
