package release

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"io/fs"
	"os"
	"path"
	"testing/fstest"
)

// files are those of an archive, by name.
type files = fstest.MapFS

// add adds a file, and the directories that it is in.
func (r *Release) add(to files, name string, mode fs.FileMode, content []byte) {
	to[name] = &fstest.MapFile{Data: content, Mode: mode, ModTime: r.Date}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		to[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755, ModTime: r.Date}
	}
}

// take adds a file of this machine.
func (r *Release) take(to files, name, from string) error {
	content, err := os.ReadFile(from)
	r.add(to, name, 0o644, content)
	return err
}

func tarball(all files) ([]byte, error) {
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	w := tar.NewWriter(packed)
	err := errors.Join(w.AddFS(all), w.Close(), packed.Close())
	return out.Bytes(), err
}

func zipped(all files) ([]byte, error) {
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	err := errors.Join(w.AddFS(all), w.Close())
	return out.Bytes(), err
}
