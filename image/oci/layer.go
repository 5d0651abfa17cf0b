package oci

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// tree is what a layer holds: path without a leading slash → file. Directories above a file come by themselves.
type tree map[string]entry

// entry is a file, a directory, a symbolic link, or all that is below a directory of the build machine.
type entry struct {
	mode fs.FileMode // permission bits, and fs.ModeDir or fs.ModeSymlink
	text string      // a file's content or a link's target
	from string      // the file on the build machine to copy, or for a tree, the directory
	all  bool        // everything below from
}

func directory(perm fs.FileMode) entry           { return entry{mode: fs.ModeDir | perm} }
func link(target string) entry                   { return entry{mode: fs.ModeSymlink, text: target} }
func text(content string) entry                  { return entry{mode: 0o644, text: content} }
func copyOf(from string, perm fs.FileMode) entry { return entry{mode: perm, from: from} }
func below(dir string) entry                     { return entry{from: dir, all: true} }

// expand replaces each "all below" by its entries and adds the directories that files lie in.
func (t tree) expand() (tree, error) {
	full := tree{}
	for at, e := range t {
		if !e.all {
			full[at] = e
			continue
		}
		found, err := rootfs.CopyOf(e.from, at)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			full[f.Path] = entry{mode: f.Mode, text: f.Text, from: f.From}
		}
	}
	for name := range maps.Clone(full) {
		for above := path.Dir(name); above != "."; above = path.Dir(above) {
			if _, known := full[above]; !known {
				full[above] = directory(0o755)
			}
		}
	}
	return full, nil
}

// writeTar writes the tree as an archive that depends on nothing but the files' names, contents and modes: sorted,
// owned by root, at the epoch.
func (t tree) writeTar(w io.Writer) error {
	full, err := t.expand()
	if err != nil {
		return err
	}
	archive := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(full)) {
		if err := full[name].writeTo(archive, name); err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
	}
	return archive.Close()
}

func (e entry) writeTo(archive *tar.Writer, name string) error {
	header := &tar.Header{Name: name, Mode: int64(e.mode.Perm()), ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	switch {
	case e.mode.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		header.Mode = int64(e.mode &^ fs.ModeDir) // with the sticky bit, which directory() is given as in chmod(2)
		return archive.WriteHeader(header)
	case e.mode&fs.ModeSymlink != 0:
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, e.text, 0o777
		return archive.WriteHeader(header)
	}
	var content io.Reader = strings.NewReader(e.text)
	header.Typeflag, header.Size = tar.TypeReg, int64(len(e.text))
	if e.from != "" {
		f, err := os.Open(e.from)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		content, header.Size = f, info.Size()
	}
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	_, err := io.Copy(archive, content)
	return err
}

// makeLayer archives a tree into a file, which must stay for as long as the layer is used.
func makeLayer(t tree, file string, asGzip bool) (v1.Layer, error) {
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	encoder, err := compressor(f, asGzip)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(t.writeTar(encoder), encoder.Close(), f.Close()); err != nil {
		return nil, err
	}
	if asGzip {
		return tarball.LayerFromFile(file, tarball.WithMediaType(types.OCILayer))
	}
	return tarball.LayerFromFile(file, tarball.WithCompression(compression.ZStd), tarball.WithMediaType(types.OCILayerZStd))
}

func compressor(to io.Writer, asGzip bool) (io.WriteCloser, error) {
	if asGzip {
		return gzip.NewWriter(to), nil
	}
	// zstd, because the 139 MB of Kubernetes take 0.16 s to unpack (gzip: 0.85 s), less than it takes to write and hash
	// them a second time as a download (0.45 s). The level doesn't matter for unpacking; this one costs half a second
	// at build time and saves 5 %. One thread: with more, how the stream is cut into blocks isn't promised to be the
	// same each time.
	return zstd.NewWriter(to, zstd.WithEncoderLevel(zstd.SpeedBetterCompression), zstd.WithEncoderConcurrency(1))
}
