// Package udev loads the drivers of a machine's devices.
//
// The kernel finds devices, sends uevents, and makes their nodes (devtmpfs).
// User space has to load the modules that drive them. The service udevd does
// that. It listens, loads the modules of all devices that exist already
// (coldplug), and is up when there is nothing left to do. It also loads a few
// modules that no device asks for, makes the links by which devices are named, and
// applies the rules of the configuration, which may change settings of devices (rules.go).
// Modprobe answers the kernel's own requests for modules. Services
// that need a disk or a network link look for it themselves.
package udev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
)

const (
	// settleTimeout limits the time in which new devices delay the service's start:
	// a device that is added and removed again and again must not block the boot.
	settleTimeout = 10 * time.Second

	// To load a module is mostly to wait for its device: several at a time.
	maxWorkers = 4
)

// ID of the service.
const ID = "udevd"

// Options are the inputs of udevd.
type Options struct {
	Mode  boot.Mode
	Store *resource.Store
}

// Service is udevd.
func Service(o Options) dag.Service {
	return dag.Service{
		ID: ID,
		Skip: func() string {
			if o.Mode == boot.Container {
				return "a container node has its host's devices"
			}
			return ""
		},
		Run: func(ctx context.Context, h *dag.Handle) error {
			d, err := newDaemon(h.Log)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(ctx)
			events, err := d.listen(ctx)
			var configured sync.WaitGroup
			defer configured.Wait()
			defer cancel()
			if err != nil {
				return err
			}
			r := &rules{sysfs: d.sysfs, dev: d.dev, log: h.Log, links: map[string][]string{}}
			configured.Go(func() { r.follow(ctx, o.Store, events) })
			return d.run(ctx, h.Started)
		},
	}
}

// daemon is one run of udevd. The goroutine in run owns all its state.
type daemon struct {
	sysfs   string
	dev     string
	log     *slog.Logger
	listen  func(context.Context) (<-chan Uevent, error)
	modules *Modules

	urgent  []job // devices
	later   []job // these can wait until udevd is up, one at a time
	running int
	up      bool   // the modules of the first devices are loaded
	seq     uint64 // of the last event seen
	loaded  int
	devices int
}

// job is a module to load or, with a modalias, a device to load modules for.
type job struct {
	modalias string
	module   string
	why      string
}

type outcome struct {
	job    job
	loaded []string
	err    error
	took   time.Duration
}

func newDaemon(log *slog.Logger) (*daemon, error) {
	dir, err := ModulesDir()
	if err != nil {
		return nil, err
	}
	modules, err := OpenModules(dir)
	if errors.Is(err, os.ErrNotExist) {
		log.Warn("this kernel has no modules beside it; devices work that are built in", "dir", dir)
		modules, err = newModules(dir), nil
	}
	if err != nil {
		return nil, err
	}
	return &daemon{sysfs: "/sys", dev: "/dev", log: log, listen: Listen, modules: modules}, nil
}

// run loads the modules of existing devices, then those of new ones, until ctx ends.
func (d *daemon) run(ctx context.Context, started func(string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// It listens before it looks for devices, so that it misses none in between.
	events, err := d.listen(ctx)
	if err != nil {
		return err
	}
	if d.seq, err = d.seqnum(); err != nil {
		return err
	}
	if err := makeStaticNodes(d.modules.dir, d.dev); err != nil {
		d.log.Warn("device nodes for modules that load on demand", "err", err)
	}
	for _, r := range required {
		d.later = append(d.later, job{module: r.Name, why: r.Why})
	}
	d.coldplug()
	d.linkAll()

	return d.loop(ctx, events, started)
}

func (d *daemon) loop(ctx context.Context, events <-chan Uevent, started func(string)) error {
	timeout := time.After(settleTimeout)
	workers := min(maxWorkers, max(2, runtime.NumCPU()))
	done := make(chan outcome, workers) // nobody waits for the loop, also when it has ended
	for {
		if !d.up && d.settled() {
			d.goOn(started)
		}
		for d.running < workers {
			j, ok := d.next()
			if !ok {
				break
			}
			d.running++
			go func() { done <- d.load(j) }()
		}
		select {
		case e, ok := <-events:
			if !ok && ctx.Err() == nil {
				return errors.New("the kernel's uevents ended")
			}
			d.take(e)
		case o := <-done:
			d.running--
			d.finish(o)
		case <-timeout:
			if !d.up {
				d.log.Warn("devices keep coming, or loading is slow; going on", "after", settleTimeout, "waiting", len(d.urgent)+d.running)
				d.goOn(started)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// goOn ends the settling.
func (d *daemon) goOn(started func(string)) {
	d.up = true
	started(fmt.Sprintf("Loaded %d modules for %d devices", d.loaded, d.devices))
}

// next takes the job to start now, if there is one. Jobs that can wait run one at
// a time, because the node that is starting needs the processors.
func (d *daemon) next() (j job, ok bool) {
	switch {
	case len(d.urgent) > 0:
		j, d.urgent = d.urgent[0], d.urgent[1:]
	case len(d.later) > 0 && d.up && d.running == 0:
		j, d.later = d.later[0], d.later[1:]
	default:
		return job{}, false
	}
	return j, true
}

// load does a job. A panic becomes the job's error: this goroutine of PID 1 has
// no other protection.
func (d *daemon) load(j job) (o outcome) {
	o.job = j
	start := time.Now()
	o.err = dag.Guard(d.log, func() (err error) {
		if j.modalias == "" {
			return d.modules.Load(j.module)
		}
		o.loaded, err = d.modules.LoadFor(j.modalias)
		return err
	})
	o.took = time.Since(start)
	return o
}

func (d *daemon) take(e Uevent) {
	if e.Lost {
		d.log.Info("uevents were lost; looking at all devices again")
		d.coldplug()
		d.linkAll()
		if seq, err := d.seqnum(); err == nil {
			d.seq = seq
		}
		return
	}
	d.seq = max(d.seq, e.Seq)
	if e.DevName != "" && slices.Contains(linked, e.Subsystem) {
		d.link(e.Subsystem, filepath.Join(d.sysfs, e.DevPath), e.DevName, e.Action == "remove")
	}
	if e.Action == "add" && e.Modalias != "" {
		d.devices++
		d.plug(e.Modalias)
	}
}

func (d *daemon) finish(o outcome) {
	switch {
	case o.err == nil && len(o.loaded) > 0:
		d.loaded += len(o.loaded)
		d.log.Info("loaded", "modules", strings.Join(o.loaded, ","), "device", o.job.modalias, "took", o.took)
	case o.err == nil && o.job.module != "":
		d.loaded++
		d.log.Info("loaded", "module", o.job.module, "for", o.job.why, "took", o.took)
	case errors.Is(o.err, ErrNoModule):
		d.log.Info("this kernel lacks a module", "module", o.job.module, "for", o.job.why)
	case o.err != nil:
		d.log.Info("not loaded", "err", o.err)
	}
}

// settled reports whether the modules for all events of the kernel so far are loaded.
func (d *daemon) settled() bool {
	if len(d.urgent) > 0 || d.running > 0 {
		return false
	}
	seq, err := d.seqnum()
	return err != nil || d.seq >= seq
}

// seqnum is the number of the last event that the kernel has sent.
func (d *daemon) seqnum() (uint64, error) {
	data, err := os.ReadFile(filepath.Join(d.sysfs, "kernel/uevent_seqnum"))
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
}

// plug queues a device. Processors can wait: their modules only make things
// faster (and take long to test themselves). If they are needed before that,
// the kernel requests them (see Modprobe).
func (d *daemon) plug(modalias string) {
	if strings.HasPrefix(modalias, "cpu:") {
		d.later = append(d.later, job{modalias: modalias})
		return
	}
	d.urgent = append(d.urgent, job{modalias: modalias})
}

// modaliasPlaces are the places of modaliases in sysfs: by bus, and by class
// for the few devices that are on no bus. That is a tenth of the files below
// /sys/devices.
var modaliasPlaces = []string{
	"bus/*/devices/*/modalias",
	"class/input/*/modalias",
	"class/dmi/*/modalias",
	"devices/system/cpu/modalias",
}

// coldplug queues the existing devices, one of each kind.
func (d *daemon) coldplug() {
	kinds := modaliases(d.sysfs)
	d.devices += len(kinds)
	for _, m := range kinds {
		d.plug(m)
	}
}

func modaliases(sysfs string) (kinds []string) {
	seen := map[string]bool{}
	for _, place := range modaliasPlaces {
		paths, _ := filepath.Glob(filepath.Join(sysfs, place)) // the pattern is valid
		slices.Sort(paths)
		for _, path := range paths {
			data, err := os.ReadFile(path)
			m := strings.TrimSpace(string(data))
			if err != nil || m == "" || seen[m] {
				continue // the device may have been removed meanwhile
			}
			seen[m] = true
			kinds = append(kinds, m)
		}
	}
	return kinds
}
