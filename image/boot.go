// Package image makes everything that a node boots. Its own job is the order: components and our programs first, then
// the kernel and the tools from the distribution's packages, then the root filesystem out of these, then the initramfs
// around it. Each step is cached under its inputs, so that a second build does nothing, and an edit of PID 1 repeats
// only what has PID 1 in it.
package image

import (
	"cmp"
	"context"
	"crypto"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/progress"
	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/garboard-os/garboard/image/version"
	"github.com/garboard-os/garboard/kernel"
	"github.com/garboard-os/garboard/kernel/deb"
)

// AptPackages are what the build machine must have installed for Build to work, besides Go.
var AptPackages = func() []string {
	all := slices.Concat(kernel.AptPackages, debian.AptPackages, squashfs.AptPackages, initramfs.AptPackages, components.AptPackages)
	slices.Sort(all)
	return slices.Compact(all)
}()

// recipe is part of the keys of root filesystem, initramfs and media: raise it when a change in how they are put
// together makes other bytes out of the same parts.
const recipe = "3"

// Names of the steps, as people see them and as the cache keeps them.
const (
	stepKernel    = "kernel"
	stepRootFS    = "rootfs"
	stepInitramfs = "initramfs"
	stepMedium    = "medium"
)

// Flavour is one of the builds of the kernel, under the names that package kernel gives them.
type Flavour = kernel.Flavour

const (
	Cloud   = kernel.Cloud   // for virtual machines
	Generic = kernel.Generic // also for bare metal
)

// nodeComponents are the components whose programs are in the root filesystem. The others come as container images.
var nodeComponents = []string{"containerd", "runc", "cni"}

// Boot is a node's software as paths on the build machine. The files are in a cache: they must not be written to, and
// stay for an hour at least (cache.Store).
type Boot struct {
	// Version is the name of the code (package version).
	Version string
	// Kernel and Initramfs are what a boot loader loads; nothing else is needed for a machine to come up. BuildRoot
	// leaves Initramfs empty.
	Kernel, Initramfs string
	// Release is what uname -r prints on the node.
	Release string
	// RootFS is the root filesystem as it is inside Initramfs, for nodes that are containers: a squashfs with an empty
	// file in PID 1's place.
	RootFS string
	// Init is PID 1, to be bound to that place, and Sandbox is what starts a container node. The latter has to be
	// called sandbox: it is runc, too.
	Init, Sandbox string
	// Key signs systems, and RootFS has its public half; nil: somebody else signs them.
	Key crypto.Signer
}

// builder holds what all steps need.
type builder struct {
	store    *cache.Store
	progress *progress.Reporter
}

// Build makes a node's software from the checkout at root, for a flavour of the kernel.
func Build(ctx context.Context, root string, store *cache.Store, r *progress.Reporter, flavour Flavour) (*Boot, error) {
	return build(ctx, root, store, r, flavour, true)
}

// BuildRoot makes what a container node boots: all but the initramfs, which is what costs most after an edit of PID 1.
// The kernel isn't left out. Its modules are in the root filesystem, and one of these for machines and containers is
// compressed once, where two would be twice.
func BuildRoot(ctx context.Context, root string, store *cache.Store, r *progress.Reporter, flavour Flavour) (*Boot, error) {
	return build(ctx, root, store, r, flavour, false)
}

func build(ctx context.Context, root string, store *cache.Store, r *progress.Reporter, flavour Flavour, archive bool) (*Boot, error) {
	b := &builder{store: store, progress: r}
	name, err := version.Of(ctx, root)
	if err != nil {
		return nil, err
	}
	builder := program.Builder{Root: root, Version: name, Store: store, Progress: r}
	steps := []string{program.Init, stepKernel, rootfs.Tools.Name, stepRootFS}
	if archive {
		steps = append(steps, stepInitramfs)
	}
	r.Plan(append(slices.Clone(nodeComponents), steps...)...)

	made, err := (&components.Builder{Root: root, Store: store, Progress: r}).Build(ctx, nodeComponents...)
	if err != nil {
		return nil, err
	}
	result := &Boot{Version: name}
	if result.Init, err = builder.Build(ctx, program.Init); err != nil {
		return nil, err
	}
	// The file, not the link: whoever links or copies it under the name sandbox has a program of that name.
	if result.Sandbox, err = filepath.EvalSymlinks(filepath.Join(made["runc"], "sandbox")); err != nil {
		return nil, err
	}
	key, public, err := b.releaseKey(ctx)
	if err != nil {
		return nil, err
	}
	result.Key = key
	linux, err := b.kernel(ctx, flavour)
	if err != nil {
		return nil, err
	}
	result.Kernel, result.Release = linux.Image(), linux.Release
	tools, err := rootfs.Tools.Build(ctx, store, r)
	if err != nil {
		return nil, err
	}
	loaders, err := loader.Build(ctx, store, r)
	if err != nil {
		return nil, err
	}
	component := map[string]string{"sandbox": "runc", "containerd-shim-runc-v2": "containerd"}
	programs := map[string]string{}
	for _, name := range rootfs.Programs {
		programs[name] = filepath.Join(made[cmp.Or(component[name], name)], name)
	}
	result.RootFS, err = b.rootFS(ctx, rootfs.Sources{
		Version: boot.Release(name), Programs: programs, Init: result.Init,
		CNI:            made["cni"],
		Tools:          tools,
		Loaders:        loaders.Disk,
		ReleaseKeys:    public,
		KernelPackages: linux.Packages, ModulesDir: linux.ModulesDir(),
	})
	if err != nil {
		return nil, err
	}
	if archive {
		contents := initramfs.Contents{Init: result.Init, RootFS: result.RootFS, ModulesDir: linux.ModulesDir()}
		if result.Initramfs, err = b.initramfs(ctx, contents); err != nil {
			return nil, err
		}
	}
	r.Summary("parts of the image", steps...)
	return result, nil
}

// rootFS packs the root filesystem, and gives back its path.
func (b *builder) rootFS(ctx context.Context, src rootfs.Sources) (string, error) {
	entries, err := rootfs.Plan(src)
	if err != nil {
		return "", err
	}
	inputs, err := describe(entries)
	if err != nil {
		return "", err
	}
	dir, err := b.progress.Build(ctx, b.store, stepRootFS, inputs, func(ctx context.Context, dir string) error {
		tree, err := os.MkdirTemp(dir, ".tree-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(tree)
		if err := rootfs.Lay(tree, entries); err != nil {
			return err
		}
		return squashfs.Pack(ctx, tree, filepath.Join(dir, initramfs.RootFSName))
	})
	return filepath.Join(dir, initramfs.RootFSName), err
}

// initramfs writes the archive around a root filesystem that rootFS packed, and gives back its path.
func (b *builder) initramfs(ctx context.Context, contents initramfs.Contents) (string, error) {
	program, err := cache.HashTree(contents.Init)
	if err != nil {
		return "", err
	}
	// The name of the root filesystem's folder is its key: it stands for all that is in there, modules included.
	inputs := append([]string{recipe, filepath.Base(filepath.Dir(contents.RootFS)), program}, initramfs.Modules...)
	dir, err := b.progress.Build(ctx, b.store, stepInitramfs, inputs, func(ctx context.Context, dir string) error {
		out, err := os.Create(filepath.Join(dir, "initramfs"))
		if err != nil {
			return err
		}
		if err := initramfs.Write(ctx, out, contents); err != nil {
			out.Close()
			return err
		}
		return out.Close()
	})
	return filepath.Join(dir, "initramfs"), err
}

// describe lists what decides the bytes of a root filesystem.
func describe(entries []rootfs.Entry) ([]string, error) {
	inputs := append([]string{recipe}, squashfs.Options()...)
	for _, e := range entries {
		inputs = append(inputs, e.Path, e.Mode.String(), e.Text)
		if e.From == "" {
			continue
		}
		hash, err := cache.HashTree(e.From)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, hash)
	}
	return inputs, nil
}

func (b *builder) kernel(ctx context.Context, flavour Flavour) (*kernel.Kernel, error) {
	lists, err := debian.Lists(ctx, b.store, b.progress)
	if err != nil {
		return nil, err
	}
	packages, err := debian.Stored(ctx, b.store, stepKernel+"-packages", lists, []string{string(flavour)}, func(ctx context.Context) ([]deb.Package, error) {
		return kernel.Resolve(ctx, lists, flavour)
	})
	if err != nil {
		return nil, err
	}
	if differs := kernel.Differs(flavour, packages); differs != "" {
		b.progress.Note(differs)
	}
	inputs := append(deb.Keys(packages), string(flavour))
	for _, row := range kernel.Modules() {
		inputs = append(inputs, row.Names, string(row.Only), fmt.Sprint(row.Optional))
	}
	dir, err := b.progress.Build(ctx, b.store, stepKernel, inputs, func(ctx context.Context, dir string) error {
		_, err := kernel.Fetch(ctx, lists, flavour, packages, dir)
		return err
	})
	if err != nil {
		return nil, err
	}
	return kernel.Open(dir)
}
