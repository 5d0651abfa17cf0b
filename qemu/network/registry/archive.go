package registry

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
)

// Archive is an OCI layout in one tar file. Its files are read from their places in it.
type Archive struct {
	file  *os.File
	files map[string]entry
}

type entry struct {
	info   fs.FileInfo
	offset int64
}

// OpenArchive reads the table of contents. The caller closes the archive.
func OpenArchive(name string) (*Archive, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	a := &Archive{file, map[string]entry{}}
	for all := tar.NewReader(file); ; {
		header, err := all.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		var at int64
		if err == nil {
			at, err = file.Seek(0, io.SeekCurrent)
		}
		if err != nil {
			file.Close()
			return nil, fmt.Errorf("%s is no archive of container images: %w", name, err)
		}
		if header.Typeflag == tar.TypeReg {
			a.files[path.Clean(header.Name)] = entry{header.FileInfo(), at}
		}
	}
	if _, there := a.files[indexFile]; !there {
		file.Close()
		return nil, fmt.Errorf("%s is no archive of container images: it has no %s", name, indexFile)
	}
	return a, nil
}

// Close closes the file.
func (a *Archive) Close() error { return a.file.Close() }

// Open opens a file of the layout.
func (a *Archive) Open(name string) (fs.File, error) {
	e, there := a.files[name]
	if !there {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return part{io.NewSectionReader(a.file, e.offset, e.info.Size()), e.info}, nil
}

// part is an open file.
type part struct {
	*io.SectionReader
	info fs.FileInfo
}

func (p part) Stat() (fs.FileInfo, error) { return p.info, nil }
func (part) Close() error                 { return nil }
