package oci

import (
	"context"
	"errors"
	"os"
	"path/filepath"
)

// WriteLayout writes an image to a directory, which exists, in the OCI image layout. A layer's files, or all files below a directory, are given by
// their path in the image: the file on this machine.
func WriteLayout(ctx context.Context, dir string, image Image, layers map[string]map[string]string) error {
	return writeLayout(ctx, dir, []Image{image}, func(name string) tree {
		content := tree{}
		for at, from := range layers[name] {
			content[at] = below(from)
		}
		return content
	})
}

// WriteArchive writes the same as one file: an archive of the OCI image layout, as tools for registries take it.
func WriteArchive(ctx context.Context, to string, image Image, layers map[string]map[string]string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(to), ".archive-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	dir := filepath.Join(work, "layout")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := WriteLayout(ctx, dir, image, layers); err != nil {
		return err
	}
	return Pack(dir, to)
}

// Pack writes a directory with an OCI image layout as one file. The content decides its bytes.
func Pack(dir, to string) (err error) {
	made, err := os.CreateTemp(filepath.Dir(to), ".archive-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(made.Name()))
		}
	}()
	defer made.Close()
	if err := (tree{"": below(dir)}).writeTar(made); err != nil {
		return err
	}
	if err := errors.Join(made.Chmod(0o644), made.Sync()); err != nil {
		return err
	}
	return os.Rename(made.Name(), to)
}
