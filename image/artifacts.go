package image

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/extensions"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/progress"
)

// Artifacts is everything that a cluster is made of, as paths in the cache.
type Artifacts struct {
	*Boot
	Components map[string]string // component → directory with its programs
	Layout     string            // OCI layout with all images
}

// Kubectl is the program that was built with the cluster.
func (a *Artifacts) Kubectl() string { return filepath.Join(a.Components["kubernetes"], "kubectl") }

// A Builder makes a node's software: Build, or BuildRoot where nodes are containers.
type Builder func(ctx context.Context, root string, store *cache.Store, r *progress.Reporter, flavour Flavour) (*Boot, error)

// BuildAll makes what isn't in the user's cache yet of everything that a cluster is
// made of, from the checkout at root, and tells out how it goes. The layout also has the
// images of optional components (components.Names).
func BuildAll(ctx context.Context, root string, out io.Writer, node Builder, flavour Flavour, optional ...string) (*Artifacts, error) {
	store, r, err := userCache(out)
	if err != nil {
		return nil, err
	}
	made, err := (&components.Builder{Root: root, Store: store, Progress: r}).Build(ctx, components.Names(optional...)...)
	if err != nil {
		return nil, err
	}
	booted, err := node(ctx, root, store, r, flavour)
	if err != nil {
		return nil, err
	}
	layout, err := oci.Build(ctx, store, r, made)
	if err != nil {
		return nil, err
	}
	return &Artifacts{Boot: booted, Components: made, Layout: layout}, nil
}

// BuildMedia makes what media are put together from.
func BuildMedia(ctx context.Context, root string, out io.Writer, flavour Flavour) (o media.Options, err error) {
	store, r, err := userCache(out)
	if err != nil {
		return o, err
	}
	made, err := Build(ctx, root, store, r, flavour)
	if err != nil {
		return o, err
	}
	o = media.Options{Version: made.Version, Release: made.Release, Kernel: made.Kernel, Initramfs: made.Initramfs, Key: made.Key}
	if o.Loader, err = loader.Build(ctx, store, r); err != nil {
		return o, err
	}
	programs := program.Builder{Root: root, Version: made.Version, Store: store, Progress: r}
	o.Program, err = programs.Build(ctx, program.Installer)
	return o, err
}

// BuildMedium makes what machines boot from with these kernel arguments: a medium or, of the kind media.InstallerKind,
// the directory with the OCI layout of the installer image. The result is in the cache.
func BuildMedium(ctx context.Context, root string, out io.Writer, flavour Flavour, kind string, args ...string) (string, error) {
	o, err := BuildMedia(ctx, root, out, flavour)
	if err != nil {
		return "", err
	}
	store, r, err := userCache(out)
	if err != nil {
		return "", err
	}
	inputs := append([]string{recipe, kind, o.Version, o.Release, o.Loader.Disk, filepath.Base(filepath.Dir(o.Program)), fmt.Sprint("signed: ", o.Key != nil)}, args...)
	for _, file := range []string{o.Kernel, o.Initramfs} {
		hash, err := cache.HashTree(file)
		if err != nil {
			return "", err
		}
		inputs = append(inputs, hash)
	}
	o.Args = args
	dir, err := r.Build(ctx, store, stepMedium, inputs, func(ctx context.Context, dir string) error {
		if kind == media.InstallerKind {
			return o.InstallerLayout(ctx, dir)
		}
		return o.Build(ctx, kind, filepath.Join(dir, kind))
	})
	if kind == media.InstallerKind {
		return dir, err
	}
	return filepath.Join(dir, kind), err
}

// BuildComponents makes some components only: name → directory with its programs.
func BuildComponents(ctx context.Context, root string, out io.Writer, names ...string) (map[string]string, error) {
	store, r, err := userCache(out)
	if err != nil {
		return nil, err
	}
	return (&components.Builder{Root: root, Store: store, Progress: r}).Build(ctx, names...)
}

// BuildExtensions makes the examples of extensions, and returns their directories by name.
func BuildExtensions(ctx context.Context, out io.Writer) (map[string]string, error) {
	store, r, err := userCache(out)
	if err != nil {
		return nil, err
	}
	return extensions.Build(ctx, store, r)
}

func userCache(out io.Writer) (*cache.Store, *progress.Reporter, error) {
	store, err := cache.Default()
	if err != nil {
		return nil, nil, err
	}
	return store, progress.New(out), nil
}
