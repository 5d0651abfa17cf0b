package oci

import (
	"compress/gzip"
	"errors"
	"io"
	"maps"
	"os"

	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// layer is what one holds. Directories above a file come by themselves.
type layer struct {
	// files are of this computer, or are directories with all below them, by their path without a leading slash.
	files map[string]string
	more  squashfs.Tree // the same in all builds
}

func (l layer) tree() (squashfs.Tree, error) {
	full := squashfs.Tree{}
	maps.Copy(full, l.more)
	for at, from := range l.files {
		found, err := rootfs.CopyOf(from, at)
		if err != nil {
			return nil, err
		}
		for _, e := range found {
			if e.From == "" {
				full[e.Path] = squashfs.Link(e.Text)
				continue
			}
			info, err := os.Stat(e.From)
			if err != nil {
				return nil, err
			}
			full[e.Path] = squashfs.File{Mode: e.Mode, Size: info.Size(), Open: func() (io.ReadCloser, error) { return os.Open(e.From) }}
		}
	}
	return full, nil
}

// pack archives a layer into a file, which must stay for as long as the result is used.
func (l layer) pack(file string, asGzip bool) (v1.Layer, error) {
	tree, err := l.tree()
	if err != nil {
		return nil, err
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	encoder, err := compressor(f, asGzip)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(tree.WriteTar(encoder), encoder.Close(), f.Close()); err != nil {
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
