package squashfs

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"time"
)

// WriteTar writes the tree as an archive that depends on nothing but the files' names, contents and modes: sorted,
// owned by root, at the epoch.
func (t Tree) WriteTar(to io.Writer) error {
	full, err := t.whole()
	if err != nil {
		return err
	}
	delete(full, root)
	archive := tar.NewWriter(to)
	for _, name := range slices.Sorted(maps.Keys(full)) {
		if err := full[name].archive(archive, name); err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
	}
	return archive.Close()
}

func (f File) archive(to *tar.Writer, name string) error {
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: f.Size, Mode: int64(f.Mode.Perm()), ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	switch {
	case f.Mode.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
	case f.Mode&fs.ModeSymlink != 0:
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Target, 0o777
	}
	if f.Mode&fs.ModeSticky != 0 {
		header.Mode |= stickyBit
	}
	if err := to.WriteHeader(header); err != nil || header.Typeflag != tar.TypeReg {
		return err
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = io.Copy(to, in)
	return err
}
