package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
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
	p.Source = o.source()
	dir := d.file(keptPrefix + p.Source)
	p.Boot = o.Boot
	files := []struct {
		from string
		to   *string
		name string
	}{
		{o.Boot.Kernel, &p.Boot.Kernel, "vmlinuz"},
		{o.Boot.Initramfs, &p.Boot.Initramfs, "initramfs"},
		{o.Boot.Medium, &p.Boot.Medium, "medium"},
		{o.Boot.Disk, &p.Boot.Disk, "disk"},
		{o.Boot.Network, &p.Boot.Network, "network"},
		{o.Boot.Installer, &p.Boot.Installer, "installer"},
		{o.Boot.Rootfs, &p.Boot.Rootfs, "rootfs"},
		{o.Boot.Init, &p.Boot.Init, "init"},
		{o.Boot.Sandbox, &p.Boot.Sandbox, "sandbox"},
		{o.Images, &p.Images, "images"},
	}
	for _, f := range files {
		if f.from != "" {
			*f.to = filepath.Join(dir, f.name)
		}
	}
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	partial := dir + ".partial"
	defer os.RemoveAll(partial)
	if err := os.RemoveAll(partial); err != nil {
		return err
	}
	if err := os.Mkdir(partial, 0o700); err != nil {
		return err
	}
	for _, f := range files {
		if f.from == "" {
			continue
		}
		if err := linkTree(ctx, f.from, filepath.Join(partial, f.name)); err != nil {
			return fmt.Errorf("keep %s for the cluster: %w", f.from, err)
		}
	}
	return os.Rename(partial, dir)
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
func (d clusterDir) keepProgram(self []string) ([]string, error) {
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
	if err := linkFile(program, partial); err != nil {
		return nil, fmt.Errorf("keep %s for the cluster: %w", program, err)
	}
	return append([]string{kept}, self[1:]...), os.Rename(partial, kept)
}

// linkTree makes links to a file, or to all files of a directory.
func linkTree(ctx context.Context, from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, inside)
		switch {
		case entry.IsDir():
			return os.Mkdir(target, 0o700)
		case entry.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		}
		return linkFile(path, target)
	})
}

// linkFile makes a link, or a copy where a link is not possible: across file systems, or
// where the kernel forbids links to other users' files (proc(5), protected_hardlinks).
func linkFile(from, to string) (err error) {
	if err := os.Link(from, to); err == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	_, err = io.Copy(out, in)
	return err
}
