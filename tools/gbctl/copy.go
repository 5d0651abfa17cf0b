package main

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) copyCommand() *cobra.Command {
	var force bool
	cmd := command("copy PATH DIRECTORY", func(cmd *cobra.Command, args []string) error {
		from, err := a.absolute(args[0])
		if err != nil {
			return err
		}
		return a.copy(cmd.Context(), from, args[1], force)
	})
	cmd.Aliases = []string{"cp"}
	cmd.Flags().BoolVar(&force, "force", false, "replace existing files")
	renamed(cmd, "f", "f", "force")
	return cmd
}

func (a *app) copy(ctx context.Context, from, to string, force bool) error {
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	return a.each(ctx, nodes, func(ctx context.Context, i int, c *client.Client) error {
		dir := to
		if len(nodes) > 1 {
			dir = filepath.Join(to, strings.ReplaceAll(nodes[i], ":", "_"))
		}
		x := &extraction{force: force, bar: a.progressBar(), note: func(format string, args ...any) {
			fmt.Fprintf(a.err, c.Name+": "+format+"\n", args...)
		}}
		err := x.from(ctx, c, from, dir)
		if x.bar.end(); err != nil {
			return err
		}
		fmt.Fprintf(a.notes(), "%s: %s with %s in %s\n", c.Name, plural(x.files, "file"), size(x.bytes), dir)
		return nil
	})
}

// problemsName is the last entry of the archive. In it, the node lists the files that it
// couldn't read.
const problemsName = "COPY-PROBLEMS"

// extraction writes one archive below one directory.
type extraction struct {
	force bool
	note  func(format string, args ...any)

	root  *os.Root
	files int
	bytes uint64
	bar   *progressBar
}

func (x *extraction) from(ctx context.Context, c *client.Client, path, dir string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	var receiving sync.WaitGroup
	receiving.Go(func() {
		err := client.Receive(ctx, c.File.Copy, &apiv1.CopyFilesRequest{Path: path}, func(m *apiv1.FileChunk) error {
			_, err := w.Write(m.Data)
			return err
		})
		w.CloseWithError(err) // nil is the end of the archive
	})
	err := x.extract(r, dir)
	if err == nil {
		// The stream continues after the archive, for example with an error of the node.
		_, err = io.Copy(io.Discard, r)
	}
	r.CloseWithError(errors.New("stopped reading"))
	cancel()
	receiving.Wait()
	return err
}

func (x *extraction) extract(r io.Reader, dir string) (err error) {
	archive := tar.NewReader(r)
	var problems error
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return problems
		}
		if err != nil {
			return err
		}
		if h.Name == problemsName && x.root != nil {
			problems = x.reportMissing(archive)
			continue
		}
		if x.root == nil {
			// Only now: if the path doesn't exist on the node, nothing is created.
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			// os.Root keeps all names and links below the directory.
			if x.root, err = os.OpenRoot(dir); err != nil {
				return err
			}
			defer x.root.Close()
		}
		if err := x.entry(h, archive); err != nil {
			return fmt.Errorf("write %q into %s: %w", h.Name, dir, err)
		}
	}
}

// entry writes one file. It creates directories that are missing in the archive.
func (x *extraction) entry(h *tar.Header, content io.Reader) error {
	name := filepath.FromSlash(strings.TrimSuffix(strings.TrimPrefix(h.Name, "./"), "/"))
	if name == "" || name == "." {
		return nil
	}
	if !filepath.IsLocal(name) {
		return errors.New("the name points outside of the directory")
	}
	if err := x.root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	mode := fs.FileMode(h.Mode) & fs.ModePerm
	switch h.Typeflag {
	case tar.TypeDir:
		// The owner must be able to write into it.
		return x.root.MkdirAll(name, mode|0o700)
	case tar.TypeReg:
		return x.regular(name, mode, h, content)
	case tar.TypeSymlink:
		return x.place(name, func() error { return x.root.Symlink(h.Linkname, name) })
	case tar.TypeLink:
		return x.place(name, func() error { return x.root.Link(filepath.FromSlash(strings.TrimPrefix(h.Linkname, "./")), name) })
	}
	x.note("left out %s: not a file, directory or link", oneLine(h.Name))
	return nil
}

// counter calls a function with the number of bytes of each write.
type counter func(int)

func (c counter) Write(p []byte) (int, error) {
	c(len(p))
	return len(p), nil
}

// place creates a file at a name that must be free. With --force it removes an existing
// file first.
func (x *extraction) place(name string, make func() error) error {
	if x.force {
		if info, err := x.root.Lstat(name); err == nil && !info.IsDir() {
			if err := x.root.Remove(name); err != nil {
				return err
			}
		}
	}
	err := make()
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%w; --force replaces it", fs.ErrExist)
	}
	if err == nil {
		x.files++
	}
	return err
}

func (x *extraction) regular(name string, mode fs.FileMode, h *tar.Header, content io.Reader) error {
	var f *os.File
	err := x.place(name, func() (err error) {
		// O_EXCL: never write through a link from an earlier entry of the archive.
		f, err = x.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode|0o200)
		return err
	})
	if err != nil {
		return err
	}
	_, err = io.Copy(f, io.TeeReader(content, counter(func(n int) {
		x.bytes += uint64(n)
		x.bar.at(fmt.Sprintf("%s with %s so far", plural(x.files, "file"), size(x.bytes)), 0, 0)
	})))
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := x.root.Chmod(name, mode); err != nil { // until now it had to be writable
		return err
	}
	return x.root.Chtimes(name, h.ModTime, h.ModTime)
}

// reportMissing reports the files that the node couldn't read.
func (x *extraction) reportMissing(list io.Reader) error {
	lines := bufio.NewScanner(list)
	n := 0
	for ; lines.Scan(); n++ {
		x.note("left out %s", oneLine(lines.Text()))
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%s missing or incomplete; all others were copied", plural(n, "file"))
}
