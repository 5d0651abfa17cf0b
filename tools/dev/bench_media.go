package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/kernel"
)

// benchMedia makes a medium of each kind, with the kernel for all machines.
func benchMedia(ctx context.Context, out io.Writer, root string) (figures []figure, err error) {
	o, err := image.BuildMedia(ctx, root, out, kernel.Generic)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "garboard-media-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	for _, kind := range media.Kinds {
		path, start := filepath.Join(dir, kind), time.Now()
		if err := o.Build(ctx, kind, path); err != nil {
			return nil, err
		}
		took := time.Since(start)
		var size int64
		err := filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			info, err := d.Info()
			if err == nil {
				size += info.Size()
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		figures = append(figures, figure{what: "medium: " + kind, value: fmt.Sprintf("%.1f MB, made in %s", float64(size)/1e6, seconds(took))})
	}
	customized, err := benchCustomization(ctx, o, dir)
	return append(figures, customized), err
}

// benchCustomization adds a file to the system, and removes some modules of it.
func benchCustomization(ctx context.Context, o media.Options, work string) (f figure, err error) {
	dir, overlay := filepath.Join(work, "installer-directory"), filepath.Join(work, "overlay")
	for _, d := range []string{dir, overlay} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return f, err
		}
	}
	if err := os.WriteFile(filepath.Join(overlay, "file"), []byte("file\n"), 0o644); err != nil {
		return f, err
	}
	if err := o.Directory(dir); err != nil {
		return f, err
	}
	start := time.Now()
	err = customize.Change{
		Remove:   []string{"/usr/lib/modules/" + o.Release + "/kernel/drivers/usb/serial"},
		Overlays: []customize.Overlay{{Name: "overlay", Dir: overlay}},
	}.Apply(ctx, dir, func(string) {})
	return figure{what: "customization: a file added, modules removed", value: seconds(time.Since(start))}, err
}
