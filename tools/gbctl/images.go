package main

import (
	"context"
	"fmt"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
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
