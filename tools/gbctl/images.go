package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/spf13/cobra"
)

func (a *app) imagesCommand() *cobra.Command {
	r := &apiv1.ImagesRequest{}
	var node bool
	cmd := command("images", func(cmd *cobra.Command, _ []string) error {
		if !node && !r.Kubernetes && len(a.nodes) == 0 {
			return a.showLines("images", config.DefaultImages())
		}
		return a.images(cmd.Context(), r)
	})
	cmd.Flags().BoolVar(&node, "node", false, "list the images on nodes (-n implies it)")
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "list the images of Kubernetes on nodes")
	cmd.AddCommand(a.pullImageCommand(), a.removeImagesCommand(), a.listImagesCommand(), a.bundleImagesCommand(), a.serveImagesCommand(), a.pushImagesCommand(), a.verifyImagesCommand())
	return a.outputFlag(cmd)
}

func (a *app) removeImagesCommand() *cobra.Command {
	r := &apiv1.RemoveImagesRequest{}
	cmd := command("rm IMAGE...", func(cmd *cobra.Command, args []string) error {
		r.Images = args
		return printEach(cmd.Context(), a, asking(ofImage, imageAPI.Remove, r), func(m *apiv1.RemoveImagesResponse) []string {
			return ofEach(m.Removed, func(name string) string { return "removed " + name })
		})
	})
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "images of Kubernetes instead of the system")
	return cmd
}

func (a *app) pullImageCommand() *cobra.Command {
	r := &apiv1.PullImageRequest{}
	cmd := command("pull IMAGE", func(cmd *cobra.Command, args []string) error {
		if err := config.CheckImage(args[0]); err != nil {
			return usagef("%w", err)
		}
		r.Image = args[0]
		return a.sequential(cmd.Context(), func(ctx context.Context, c *client.Client) error { return a.pullImage(ctx, c, r) })
	})
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "for Kubernetes instead of the system")
	cmd.Flags().BoolVar(&r.Again, "again", false, "also if a node has an image of this name: the tag may name another one now")
	return cmd
}

// pullImage has a node pull an image. The node ends the pull itself, and sends its progress each second.
func (a *app) pullImage(ctx context.Context, c *client.Client, r *apiv1.PullImageRequest) error {
	bar := a.progressBar()
	defer bar.end()
	return client.Receive(ctx, c.Image.Pull, r, func(p *apiv1.PullImageProgress) error {
		if p.Digest != "" {
			bar.end()
			fmt.Fprintf(a.out, "%s: %s %s\n", c.Name, r.Image, oneLine(p.Digest))
		} else {
			bar.at(fmt.Sprintf("%s: %s of %s", c.Name, size(p.Done), size(p.Total)), p.Done, p.Total)
		}
		return nil
	})
}

func (a *app) images(ctx context.Context, r *apiv1.ImagesRequest) error {
	head := []string{"NAMESPACE", "NAME", "DIGEST", "SIZE", "CREATED"}
	return list(ctx, a, head, asking(ofImage, imageAPI.List, r), rowsOf((*apiv1.ImagesResponse).GetImages, func(i *apiv1.ContainerImage) []string {
		created := ""
		if i.Created != nil {
			created = i.Created.AsTime().UTC().Format("2006-01-02 15:04")
		}
		return []string{i.Namespace, i.Name, shortDigest(i.Digest), size(i.Size), created}
	}))
}

func (a *app) bundleImagesCommand() *cobra.Command {
	var which imageList
	var output string
	var mirrors map[string][]string
	cmd := command("bundle [IMAGE...]", func(cmd *cobra.Command, args []string) error {
		images, err := which.images(a, args)
		if err != nil {
			return err
		}
		say := func(line string) { fmt.Fprintln(a.notes(), line) }
		return imagebundle.Bundle{Say: say, Mirrors: mirrors}.Write(cmd.Context(), images, output)
	})
	which.flags(cmd)
	cmd.Flags().StringVarP(&output, outputFile, "O", "images.tar", "file to write")
	renamed(cmd, "output", "o", outputFile)
	mirrorsVar(cmd.Flags(), &mirrors, pullFrom)
	return cmd
}

// imageList are the flags that choose images.
type imageList struct {
	purpose, to string
	configs     []string
}

// What images are for.
const (
	forCluster = "cluster"
	forInstall = "install"
	forUpgrade = "upgrade"
)

func (l *imageList) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	choiceFlag(cmd, &l.purpose, "for", "", "what the images are for: cluster, install (the installer image of this release, and the image that its pods need) or upgrade (of Kubernetes, to the version --to)", forCluster, forInstall, forUpgrade)
	f.StringVar(&l.to, "to", "", "version of Kubernetes after the upgrade (default "+config.KubernetesVersion+")")
	f.StringArrayVarP(&l.configs, "config", "f", nil, "machine configuration whose images are meant, instead of the default ones; repeatable")
}

// images are those that were named, or that the flags choose, each once.
func (l *imageList) images(a *app, named []string) (all []string, err error) {
	switch {
	case l.to != "" && l.purpose != forUpgrade:
		err = usagef("--to is only for --for %s", forUpgrade)
	case len(l.configs) > 0 && l.purpose == forInstall:
		err = usagef("--config isn't for --for %s", forInstall)
	case len(named) > 0:
		all = named
	case l.purpose == forInstall:
		// The system runs pods with this image, whatever the configuration is.
		all = []string{media.InstallerImage(boot.Version), config.DefaultPauseImage}
	case l.purpose == forUpgrade && len(l.configs) == 0:
		all, err = new(config.Config).KubernetesImages(l.to)
	case len(l.configs) == 0:
		all = config.DefaultImages()
	}
	if err != nil {
		return nil, err
	}
	for _, path := range l.configs {
		c, _, err := a.readConfig(path, config.Load)
		if err != nil {
			return nil, err
		}
		its := c.Images()
		if l.purpose == forUpgrade {
			if its, err = c.KubernetesImages(l.to); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
		}
		all = append(all, its...)
	}
	return once(all), nil
}

func (a *app) listImagesCommand() *cobra.Command {
	var which imageList
	cmd := command("list", func(*cobra.Command, []string) error {
		images, err := which.images(a, nil)
		if err != nil {
			return err
		}
		return a.showLines("images", images)
	})
	which.flags(cmd)
	return a.outputFlag(cmd)
}

func (a *app) verifyImagesCommand() *cobra.Command {
	var which imageList
	cmd := command("verify [IMAGE...]", func(cmd *cobra.Command, args []string) (err error) {
		r := &apiv1.CheckImagesRequest{}
		if len(args) > 0 || which.purpose != forCluster || which.to != "" || len(which.configs) > 0 {
			if r.Images, err = which.images(a, args); err != nil {
				return err
			}
		}
		return a.verifyImages(cmd.Context(), r)
	})
	which.flags(cmd)
	return a.outputFlag(cmd)
}

func (a *app) verifyImages(ctx context.Context, r *apiv1.CheckImagesRequest) error {
	answers, failed := gather(ctx, a, func(ctx context.Context, c *client.Client) ([]*apiv1.ImageCheck, error) {
		return receiveAll(ctx, c.Image.Check, r)
	})
	all, missing := 0, 0
	err := showItems(a, answers, []string{"NODE", "IMAGE", "STATE", "DIGEST"}, func(node string, i *apiv1.ImageCheck) []string {
		all++
		state, detail := "can be pulled", shortDigest(i.Digest)
		switch {
		case i.Error != "":
			missing++
			state, detail = "can't be had", i.Error
		case i.Here:
			state = "is there"
		}
		return []string{node, i.Image, state, detail}
	})
	if err = errors.Join(err, failed); missing > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d images can't be had", missing, all))
	}
	return err
}

func (a *app) serveImagesCommand() *cobra.Command {
	var listen string
	cmd := command("serve FILE", func(cmd *cobra.Command, args []string) error {
		archive, err := registry.OpenArchive(args[0])
		if err != nil {
			return err
		}
		defer archive.Close()
		if err := registry.Check(archive); err != nil {
			return fmt.Errorf("%s: %w", args[0], err)
		}
		l, err := net.Listen("tcp", listen)
		if err != nil {
			return fmt.Errorf("%w: choose another port with --listen", err)
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "serving the images of %s on port %d. Ctrl-C ends it. For nodes:\n  machine: {registries: {mirrors: {'*': {endpoints: [\"http://ADDRESS:%[2]d\"]}}}}\n", args[0], l.Addr().(*net.TCPAddr).Port)
		return imagebundle.Serve(cmd.Context(), l, logged(registry.Serve(archive), func(line string) { fmt.Fprintln(a.out, line) }))
	})
	cmd.Flags().StringVar(&listen, "listen", ":5000", "address and port to listen on")
	return cmd
}

// logged writes a line for each manifest that a node asks for.
func logged(h http.Handler, say func(string)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") {
			host, _, _ := net.SplitHostPort(r.RemoteAddr)
			say(fmt.Sprintf("%s %s asks for %s", time.Now().Format(time.TimeOnly), host, oneLine(strings.TrimPrefix(r.URL.Path, "/v2/"))))
		}
		h.ServeHTTP(w, r)
	})
}

func (a *app) pushImagesCommand() *cobra.Command {
	var insecure bool
	cmd := command("push FILE REGISTRY", func(cmd *cobra.Command, args []string) error {
		archive, err := registry.OpenArchive(args[0])
		if err != nil {
			return err
		}
		defer archive.Close()
		return imagebundle.Bundle{Say: func(line string) { fmt.Fprintln(a.out, line) }}.Push(cmd.Context(), archive, args[1], insecure)
	})
	cmd.Flags().BoolVar(&insecure, "plain-http", false, "the registry has no TLS")
	renamed(cmd, "insecure", "", "plain-http")
	return cmd
}
