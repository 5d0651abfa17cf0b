// Package files lays the files of machine.files.
//
// It is the service `files`. /etc is an overlay that each boot begins empty over
// the image, so what is laid there is gone with the power, and appending to a
// file of the image never happens twice: the result is always the image's file
// and the content. /var outlives a boot, so a list of what was laid is kept
// beside it. A file that leaves the configuration is the image's again, or gone.
//
// One broken entry never keeps the others, or the node, from going on.
package files

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// ID of the service.
	ID = "files"

	// retryEvery is how often what couldn't be laid is tried again: a full disk
	// gets room, a program takes its own file away.
	retryEvery = 30 * time.Second
	// maxImageFile bounds what content is appended to. The largest file of an image
	// that people append to, the bundle of authorities, has a quarter of a megabyte.
	maxImageFile = 16 << 20
)

// Status is one file of the configuration; its ID is the path there.
type Status struct {
	Op          config.FileOp   `yaml:"op" column:"OP"`
	Permissions config.FileMode `yaml:"permissions" column:"MODE"`
	Size        int             `yaml:"size" column:"SIZE"` // bytes, with what it was appended to
	SHA256      string          `yaml:"sha256"`             // of the whole file
	Problem     string          `yaml:"problem,omitempty" column:"PROBLEM"`
}

// Statuses has an object for each path in machine.files.
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "FileStatuses.runtime.garboard.dev",
	Kind:      "FileStatus",
	Aliases:   []string{"files", "file"},
	Namespace: "runtime",
})

// Layout is what the service has done last.
type Layout struct {
	Config   uint64 `yaml:"config" column:"CONFIG"` // the version of the machine configuration that it was for
	Files    int    `yaml:"files" column:"FILES"`
	Problems int    `yaml:"problems" column:"PROBLEMS"`
}

// Layouts has one object, LayoutID, once the service has been through.
var Layouts = resource.Define[Layout](resource.Definition{
	Type:      "FileLayouts.runtime.garboard.dev",
	Kind:      "FileLayout",
	Namespace: "runtime",
})

// LayoutID names the one layout.
const LayoutID = "files"

// layTime is ample for writing what fits into a configuration.
const layTime = 30 * time.Second

// Await returns once the files are those of the configuration that applies now:
// for who reads some at its start, and may be started anew because they change.
func Await(ctx context.Context, s *resource.Store) error {
	o, err := configuration.Configs.Get(s, configuration.ConfigID)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, layTime)
	defer cancel()
	return Layouts.When(s, LayoutID, "the files of the configuration to be laid", func(l Layout) bool { return l.Config >= o.Version }).Wait(ctx)
}

// Options are what the service stands on.
type Options struct {
	Store *resource.Store
	Logs  *logs.Logs

	root string // "/"; tests have their own
	// image opens the root filesystem without what is mounted over it.
	image func() image
}

// Daemon is the service; its state belongs to the goroutine of run, and outlives
// a restart of the service.
type Daemon struct {
	o   Options
	log *slog.Logger

	laid   map[string]string // by path: the digest of what was laid; nil before the first time
	made   map[string]bool   // directories that were made for files
	broken bool              // something is to be tried again
}

// New makes the service; nothing runs yet.
func New(o Options) *Daemon {
	option.Default(&o.root, "/")
	option.Default(&o.image, openImage)
	return &Daemon{o: o, log: o.Logs.Logger(ID), made: map[string]bool{}}
}

// Service is files in the graph: up when all that can be laid is. Disks come
// first, for /var.
func (d *Daemon) Service() dag.Service {
	return dag.Service{
		ID:      ID,
		Run:     d.run,
		Restart: dag.RestartAlways,
	}
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	configs := d.o.Store.Watch(ctx, configuration.Configs.Type())
	if err := d.follow(); err != nil {
		return err
	}
	h.Started(fmt.Sprintf("%d files laid", len(d.laid)))
	for {
		var retry <-chan time.Time
		if d.broken {
			retry = time.After(retryEvery)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-configs:
		case <-retry:
		}
		if err := d.follow(); err != nil {
			return err
		}
	}
}

// follow makes the files what the configuration says now. Entries that can't be
// laid are reported in their status and in the log; an error is about all of them.
func (d *Daemon) follow() error {
	cfg, err := configuration.Configs.Get(d.o.Store, configuration.ConfigID)
	if err != nil {
		return err
	}
	img := d.o.image()
	defer img.Close()
	if d.laid == nil {
		if d.laid, err = d.readRecord(); err != nil {
			d.log.Warn(fmt.Sprintf("which files of earlier boots are in %s is unknown: %v", boot.EphemeralDir, err))
			d.laid = map[string]string{}
		}
	}
	before := len(d.laid)
	problems, err := d.lay(img, cfg.Spec.Machine.Files)
	if problems > 0 && before > 0 && err == nil {
		// What was in the way may have been taken back only now.
		problems, err = d.lay(img, cfg.Spec.Machine.Files)
	}
	if err != nil {
		return err
	}
	return Layouts.Put(d.o.Store.As(ID), LayoutID, Layout{Config: cfg.Version, Files: len(d.laid), Problems: problems})
}

func (d *Daemon) lay(img image, entries []config.File) (problems int, err error) {
	wanted, order, statuses := d.plan(img, entries)
	d.broken = false
	for path := range d.laid {
		if wanted[path] == nil {
			d.takeBack(img, path)
		}
	}
	for _, path := range order {
		f := wanted[path]
		status := Status{Op: f.op, Permissions: f.mode, Size: len(f.content), SHA256: digest(f.content)}
		if err := d.write(img, path, f); err != nil {
			status.Problem = err.Error()
		}
		for _, name := range f.names {
			statuses[name] = status
		}
	}
	if err := d.writeRecord(); err != nil {
		d.log.Warn(err.Error() + "; trying again")
		d.broken = true
	}
	return d.publish(statuses)
}

// publish writes the statuses and logs each new problem once.
func (d *Daemon) publish(statuses map[string]Status) (problems int, err error) {
	for name, s := range statuses {
		if s.Problem == "" {
			continue
		}
		problems++
		if old, _ := Statuses.Get(d.o.Store, name); old.Spec.Problem != s.Problem {
			d.log.Warn(fmt.Sprintf("machine.files: %s: %s", name, s.Problem))
		}
	}
	d.broken = d.broken || problems > 0
	return problems, Statuses.Replace(d.o.Store.As(ID), statuses)
}

// at is where a path is in a test's root.
func (d *Daemon) at(path string) string { return filepath.Join(d.o.root, path) }
