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
	return figures, nil
}
