package api

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// maxPseudoCopy bounds a file of /proc or /sys in an archive. An archive has the size of
	// a file before its content, so that such a file is in memory first.
	maxPseudoCopy = 1 << 20
	// maxProblems bounds the list of files that aren't in an archive.
	maxProblems = 1000
	// problemsName is the name of that list in the archive.
	problemsName = "COPY-PROBLEMS"
)

func (s *fileService) Copy(ctx context.Context, req *connect.Request[apiv1.CopyFilesRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	path, err := s.at(req.Msg.GetPath())
	if err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return fileError(err)
	}
	out := bufio.NewWriterSize(chunks{stream}, fileChunk)
	c := &copier{ctx: ctx, tar: tar.NewWriter(out), top: path, pseudo: pseudoDir(path)}
	if err := filepath.WalkDir(path, c.visit); err != nil {
		return err
	}
	if err := c.finish(); err != nil {
		return err
	}
	return out.Flush()
}

// chunks is a stream as a writer. Buffered, its messages are as large as they may be.
type chunks struct {
	*connect.ServerStream[apiv1.FileChunk]
}

func (c chunks) Write(p []byte) (int, error) {
	for part := range slices.Chunk(p, fileChunk) {
		if err := c.Send(&apiv1.FileChunk{Data: part}); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// copier makes an archive of a tree. What can't be read doesn't end it: it is
// named at the end.
type copier struct {
	ctx      context.Context
	tar      *tar.Writer
	top      string
	pseudo   bool // the top is in /proc or the like
	problems []string
}

func (c *copier) problem(err error) {
	if len(c.problems) < maxProblems {
		c.problems = append(c.problems, readable(err.Error()))
	}
}

// visit is fs.WalkDirFunc. Its errors end the copy.
func (c *copier) visit(path string, entry fs.DirEntry, err error) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if err != nil {
		if path == c.top {
			return fileError(err)
		}
		c.problem(err)
		return nil
	}
	info, err := entry.Info()
	if err != nil {
		c.problem(err)
		return nil
	}
	name := c.name(path)
	switch {
	case info.Mode().IsRegular():
		return c.file(path, name)
	case info.Mode()&fs.ModeSocket != 0:
		return nil // archives can't hold one, and it is nothing without its program
	}
	link := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if link, err = os.Readlink(path); err != nil {
			c.problem(err)
			return nil
		}
	}
	header, err := tar.FileInfoHeader(info, link)
	if err != nil {
		c.problem(err)
		return nil
	}
	header.Name = name
	if info.IsDir() {
		header.Name += "/"
	}
	if err := c.tar.WriteHeader(header); err != nil {
		return err
	}
	if info.IsDir() && !c.pseudo && pseudoDir(path) {
		return fs.SkipDir // who wants /proc asks for it
	}
	return nil
}

// name is the name of a file in the archive: the last part of the requested path, and the
// path below.
func (c *copier) name(path string) string {
	base := filepath.Base(c.top)
	if base == "/" {
		base = "root"
	}
	below, err := filepath.Rel(c.top, path)
	if err != nil {
		return base
	}
	return filepath.Join(base, below)
}

// file adds a file. It may grow or shrink meanwhile: the archive has what was there
// when it was opened, with zeros for what is gone.
func (c *copier) file(path, name string) error {
	f, err := openRegular(path)
	if err != nil {
		if path == c.top {
			return err
		}
		c.problem(err)
		return nil
	}
	defer f.Close()
	header, err := tar.FileInfoHeader(f.info, "")
	if err != nil {
		c.problem(err)
		return nil
	}
	header.Name = name
	var content io.Reader = f
	if f.pseudo {
		data, err := io.ReadAll(io.LimitReader(f, maxPseudoCopy))
		if err != nil {
			c.problem(err)
			return nil
		}
		if len(data) == maxPseudoCopy {
			c.problem(fmt.Errorf("%s: only its first %d KiB", path, maxPseudoCopy>>10))
		}
		content, header.Size = bytes.NewReader(data), int64(len(data))
	}
	if err := c.tar.WriteHeader(header); err != nil {
		return err
	}
	n, err := io.CopyN(c.tar, sleep.Reader(c.ctx, content), header.Size)
	if err == nil {
		return nil
	}
	if !errors.Is(err, io.EOF) && !errors.As(err, new(*fs.PathError)) {
		return err // the caller is gone
	}
	c.problem(fmt.Errorf("%s: %d of %d bytes, zeros follow: %w", path, n, header.Size, err))
	_, err = io.CopyN(c.tar, nothing{}, header.Size-n)
	return err
}

// nothing is zeros without end.
type nothing struct{}

func (nothing) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// finish adds what couldn't be copied.
func (c *copier) finish() error {
	if len(c.problems) > 0 {
		var text bytes.Buffer
		for _, p := range c.problems {
			fmt.Fprintln(&text, p)
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: problemsName, Size: int64(text.Len()), Mode: 0o600}
		if err := c.tar.WriteHeader(header); err != nil {
			return err
		}
		if _, err := c.tar.Write(text.Bytes()); err != nil {
			return err
		}
	}
	return c.tar.Close()
}

func pseudoDir(path string) bool {
	f, err := untrusted.OpenNamed(path, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return isPseudo(f)
}
