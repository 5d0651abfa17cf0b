package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// The files that a cluster boots come from a cache, which removes old files, and its host
// process from a checkout, which can be built again or cleaned. So a cluster has its own
// copies of both: links where the file system allows it.

// keptPrefix is the prefix of directories with files to boot. The rest of the name
// identifies their source.
const keptPrefix = "boot-"

// source identifies the files that the caller boots, by their paths: in a build cache,
// paths contain the hash of the content.
func (o Options) source() string {
	b := o.Boot
	sum := sha256.Sum256([]byte(strings.Join([]string{b.Kernel, b.Initramfs, b.Medium, b.Disk, b.Network, b.Installer, b.Rootfs, b.Init, b.Sandbox, o.Images}, "\n")))
	return hex.EncodeToString(sum[:8])
}

// keep makes the plan boot the cluster's own copies. Those of an earlier plan are removed
// only by forget, once the plan is written.
func (d clusterDir) keep(ctx context.Context, p *Plan, o Options) error {
	p.Source, p.Boot, p.Images = o.source(), o.Boot, o.Images
	dir := d.file(keptPrefix + p.Source)
	files := map[string]*string{
		"vmlinuz": &p.Boot.Kernel, "initramfs": &p.Boot.Initramfs, "medium": &p.Boot.Medium, "disk": &p.Boot.Disk, "network": &p.Boot.Network,
		"installer": &p.Boot.Installer, "rootfs": &p.Boot.Rootfs, "init": &p.Boot.Init, "sandbox": &p.Boot.Sandbox, "images": &p.Images,
	}
	maps.DeleteFunc(files, func(_ string, from *string) bool { return *from == "" })
	if _, err := os.Stat(dir); err != nil {
		partial := dir + ".partial"
		defer os.RemoveAll(partial)
		if err := errors.Join(os.RemoveAll(partial), os.Mkdir(partial, 0o700)); err != nil {
			return err
		}
		for name, from := range files {
			if err := linkTree(ctx, *from, filepath.Join(partial, name)); err != nil {
				return fmt.Errorf("keep %s for the cluster: %w", *from, err)
			}
		}
		if err := os.Rename(partial, dir); err != nil {
			return err
		}
	}
	for name, file := range files {
		*file = filepath.Join(dir, name)
	}
	return nil
}

// forget removes the copies of earlier plans.
func (d clusterDir) forget(p Plan) error {
	all, err := filepath.Glob(d.file(keptPrefix + "*"))
	if err != nil {
		return err
	}
	for _, dir := range all {
		base := filepath.Base(dir)
		if base == keptPrefix+p.Source || slices.ContainsFunc(p.Nodes, func(n Node) bool { return n.Name == base }) {
			continue // what it boots, or a node of a cluster whose name begins so
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// keepProgram makes a copy of the host process's program.
func (d clusterDir) keepProgram(ctx context.Context, self []string) ([]string, error) {
	program, err := filepath.EvalSymlinks(self[0])
	if err != nil {
		return nil, fmt.Errorf("program of the host process: %w", err)
	}
	kept := d.file("host")
	if program == kept {
		return self, nil
	}
	partial := kept + ".partial"
	if err := os.RemoveAll(partial); err != nil {
		return nil, err
	}
	if err := linkTree(ctx, program, partial); err != nil {
		return nil, fmt.Errorf("keep %s for the cluster: %w", program, err)
	}
	return append([]string{kept}, self[1:]...), os.Rename(partial, kept)
}

// linkTree makes links to a file, or to all files of a directory, or copies where a link is not possible: across file
// systems, or where the kernel forbids links to other users' files (proc(5), protected_hardlinks).
func linkTree(ctx context.Context, from, to string) error {
	if _, err := os.Lstat(from); err != nil {
		return err
	}
	if exec.CommandContext(ctx, "cp", "-rl", from, to).Run() == nil {
		return nil
	}
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if said, err := exec.CommandContext(ctx, "cp", "-r", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(said))
	}
	return nil
}
