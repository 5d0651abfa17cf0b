package main

import (
	"archive/zip"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
)

const (
	// supportLines is the default number of lines of each log: about an hour of a busy
	// kubelet.
	supportLines = 5000

	// perNode and supportParallel limit the simultaneous requests to one node and to all
	// nodes, because nodes have other work, and because each request can need supportItem
	// bytes of local memory.
	perNode         = 6
	supportParallel = 12
)

func (a *app) supportCommand() *cobra.Command {
	s := &bundle{app: a}
	cmd := command("support", func(cmd *cobra.Command, _ []string) error {
		if s.lines <= 0 {
			return usagef("--tail must be more than zero")
		}
		return s.make(cmd.Context())
	})
	cmd.Flags().StringVarP(&s.path, outputFile, "O", "", "file to write (default garboard-support-TIME.zip)")
	cmd.Flags().IntVar(&s.lines, "tail", supportLines, "number of last lines of each log")
	return a.insecureFlags(cmd)
}

// bundle is the support file while it is written.
type bundle struct {
	app   *app
	path  string
	lines int

	slots chan struct{} // supportParallel

	mu          sync.Mutex // guards what follows: a zip file is written one entry at a time
	zip         *zip.Writer
	err         error // of writing it; the collection stops
	bar         *progressBar
	asks, ready uint64 // requests, and those of them that have ended
}

// make writes the file. It has its final name only when it is complete.
func (s *bundle) make(ctx context.Context) (err error) {
	now := time.Now()
	if s.path == "" {
		s.path = "garboard-support-" + now.UTC().Format("20060102-150405") + ".zip"
	}
	nodes, err := s.app.targets(ctx)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(s.path); err == nil {
		return usagef("%s exists already: choose another file with -O", s.path)
	}
	var reports []*nodeReport
	var failed error
	err = writeNew(s.path, func(f *os.File) error {
		reports, failed = s.collect(ctx, f, nodes, now)
		if all, ok := errors.AsType[*nodeErrors](failed); ok && len(all.failed) == len(nodes) {
			return cmp.Or(ctx.Err(), s.err, failed) // the bundle would be empty
		}
		return cmp.Or(ctx.Err(), s.err)
	})
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s was created in the meantime: choose another file with -O", s.path)
	} else if err != nil {
		return fmt.Errorf("write %s: %w", s.path, err)
	}
	s.printSummary(reports)
	return failed
}

// collect collects from all nodes at the same time, and writes the archive. The error is
// about nodes without any data.
func (s *bundle) collect(ctx context.Context, w io.Writer, nodes []string, now time.Time) ([]*nodeReport, error) {
	s.zip = zip.NewWriter(w)
	s.slots = make(chan struct{}, supportParallel)
	s.bar = s.app.progressBar()
	defer s.bar.end()
	reports := make([]*nodeReport, len(nodes))
	for i, node := range nodes {
		reports[i] = &nodeReport{node: node, folder: s.folder(nodes, i)}
	}
	errs := parallel(len(nodes), func(i int) error { return s.node(ctx, reports[i]) })
	for _, r := range reports {
		slices.SortFunc(r.files, func(a, b fileReport) int { return strings.Compare(a.name, b.name) })
		if r.err == nil {
			s.add(r.folder+"/errors.txt", r.errors())
		}
	}
	s.add("summary.txt", summary(reports, now))
	if err := s.zip.Close(); s.err == nil {
		s.err = err
	}
	return reports, collect(nodes, errs)
}

// add writes one file. The text must not contain secrets.
func (s *bundle) add(name string, text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	w, err := s.zip.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: time.Now().UTC()})
	if err == nil {
		_, err = w.Write(text)
	}
	s.err = err
}

// count counts requests, and those of them that have ended.
func (s *bundle) count(asks, ready uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks, s.ready = s.asks+asks, s.ready+ready
	s.bar.at(fmt.Sprintf("collected %d of %d", s.ready, s.asks), s.ready, s.asks)
}

// writeError returns the error of writing the file, if any.
func (s *bundle) writeError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// folder returns a directory name for a node that is valid on all systems.
func (s *bundle) folder(nodes []string, i int) string {
	name := fileName(nodes[i])
	for _, other := range nodes[:i] {
		if fileName(other) == name {
			return fmt.Sprintf("%s-%d", name, i+1)
		}
	}
	return name
}

// fileName makes a file name from a name on a node.
func fileName(text string) string {
	name := strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '.' || r == '-' || r == '_' {
			return r
		}
		return '_'
	}, text)
	if name = strings.TrimLeft(name, "."); name == "" {
		return "_"
	}
	return name[:min(len(name), maxFileName)]
}

// maxFileName leaves room for a suffix within the 255 bytes that file systems allow.
const maxFileName = 200

// printSummary prints what was collected.
func (s *bundle) printSummary(reports []*nodeReport) {
	var nodes, files, missing, secrets int
	for _, r := range reports {
		if r.err != nil {
			continue // its error is printed at the end
		}
		nodes++
		files += len(r.files)
		missing += len(r.missing)
		for _, f := range r.files {
			for _, n := range f.secrets {
				secrets += n
			}
		}
	}
	fmt.Fprintf(s.app.out, "%s: %s of %s", s.path, plural(files, "file"), plural(nodes, "node"))
	if info, err := os.Stat(s.path); err == nil {
		fmt.Fprintf(s.app.out, ", %s", size(uint64(info.Size())))
	}
	fmt.Fprintf(s.app.out, "; %s recognised and replaced\n", plural(secrets, "secret"))
	if missing > 0 {
		fmt.Fprintf(s.app.err, "%s missing: see errors.txt in the directory of each node\n", plural(missing, "thing"))
	}
}

// summary is the content of summary.txt, an overview for the reader of the bundle.
func summary(reports []*nodeReport, now time.Time) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "Collected by gbctl %s on %s.\n", boot.Version, stamp(now))
	b.WriteString("Secrets were replaced by " + hidden + ": nodes leave out the secrets that they know,\nand gbctl recognised the following numbers of other secrets by their form.\n")
	for _, r := range reports {
		fmt.Fprintf(&b, "\n%s\n", r.node)
		if r.err != nil {
			fmt.Fprintf(&b, "  nothing could be collected: %s\n", strings.ReplaceAll(r.err.Error(), "\n", "\n  "))
			continue
		}
		fmt.Fprintf(&b, "  %s in %s, %s missing (errors.txt)\n", plural(len(r.files), "file"), r.folder, plural(len(r.missing), "thing"))
		for _, f := range r.files {
			for _, kind := range slices.Sorted(maps.Keys(f.secrets)) {
				fmt.Fprintf(&b, "  %s: %s: %d\n", f.name, kind, f.secrets[kind])
			}
		}
	}
	text, _ := scrub([]byte(b.String()))
	return text
}
