// Package udev brings the drivers of a machine's devices into the kernel.
//
// The kernel finds devices and says so (uevents), makes their nodes (devtmpfs),
// and leaves it to user space to load the module that drives them. The service
// udevd does that: it listens, loads for all devices that were there before it
// listened (coldplug), and is up when there is nothing left to do. It also loads
// a few modules that no device asks for, and Modprobe answers the kernel's own
// requests for modules. There are no rules and no names: who looks for a disk
// or a link looks at it.
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
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
)

const (
	// settleTimeout bounds how long the service isn't up because devices keep
	// coming: one that comes and goes for ever mustn't hold up the boot.
	settleTimeout = 10 * time.Second

	// Loading a module mostly waits for its device to answer: some at a time.
	maxWorkers = 4
)

// ID of the service.
const ID = "udevd"

// Options are what udevd takes.
type Options struct {
	Mode boot.Mode
	Logs *logs.Logs
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
	later   []job // what can wait until udevd is up, one at a time
	running int
	up      bool   // the devices that were there have been seen to
	seq     uint64 // of the last event seen
	loaded  int
	failed  int
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

// run loads for what is there, then for what comes, until ctx ends.
func (d *daemon) run(ctx context.Context, started func(string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Listening comes before looking, or a device between the two is missed.
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
	d.require()
	d.coldplug()

	work, done := make(chan job), make(chan outcome)
	for range min(maxWorkers, max(2, runtime.NumCPU())) {
		go d.worker(ctx, work, done)
	}
	return d.loop(ctx, events, work, done, started)
}

func (d *daemon) loop(ctx context.Context, events <-chan Uevent, work chan<- job, done <-chan outcome, started func(string)) error {
	timeout := time.After(settleTimeout)
	for {
		if !d.up && d.settled() {
			d.goOn(started)
		}
		// Without a job the channel is nil, and its case never chosen.
		var to chan<- job
		j, ok := d.next()
		if ok {
			to = work
		}
		select {
		case e, ok := <-events:
			if !ok && ctx.Err() == nil {
				return errors.New("the kernel's uevents ended")
			}
			d.take(e)
		case to <- j:
			d.dispatched()
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
	d.substitute()
	started(fmt.Sprintf("Loaded %d modules for %d devices", d.loaded, d.devices))
}

// next is the job to hand out now, if there is one. What can wait doesn't take a
// processor from the node that is starting: one at a time.
func (d *daemon) next() (j job, ok bool) {
	switch {
	case len(d.urgent) > 0:
		return d.urgent[0], true
	case len(d.later) > 0 && d.up && d.running == 0:
		return d.later[0], true
	}
	return job{}, false
}

// dispatched notes that the job that next gave has been handed out.
func (d *daemon) dispatched() {
	d.running++
	if len(d.urgent) > 0 {
		d.urgent = d.urgent[1:]
		return
	}
	d.later = d.later[1:]
}

func (d *daemon) worker(ctx context.Context, work <-chan job, done chan<- outcome) {
	for {
		select {
		case j := <-work:
			o := d.load(j)
			select {
			case done <- o:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// load does a job. A panic in it becomes its error: this runs in a goroutine that
// nobody else guards, inside PID 1.
func (d *daemon) load(j job) (o outcome) {
	o.job = j
	start := time.Now()
	defer func() {
		o.took = time.Since(start)
		if r := recover(); r != nil {
			o.err = fmt.Errorf("load for %+v: panic: %v", j, r)
		}
	}()
	if j.modalias != "" {
		o.loaded, o.err = d.modules.LoadFor(j.modalias)
	} else {
		o.err = d.modules.Load(j.module)
	}
	return o
}

func (d *daemon) take(e Uevent) {
	if e.Lost {
		d.log.Info("uevents were lost; looking at all devices again")
		d.coldplug()
		if seq, err := d.seqnum(); err == nil {
			d.seq = seq
		}
		return
	}
	d.seq = max(d.seq, e.Seq)
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
		d.failed++
		d.log.Info("not loaded", "err", o.err)
	}
}

// settled says that all devices that the kernel has told of have been seen to.
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

// require queues the modules of the table.
func (d *daemon) require() {
	for _, r := range required {
		d.later = append(d.later, job{module: r.name, why: r.why})
	}
}

// substitute queues what stands in for what no device has brought.
func (d *daemon) substitute() {
	for _, r := range substitutes {
		if _, err := os.Stat(filepath.Join(d.dev, r.unless)); errors.Is(err, os.ErrNotExist) {
			d.later = append(d.later, job{module: r.name, why: r.why})
		}
	}
}

// plug queues a device. Those of processors can wait: their modules make things
// quicker (and test themselves at length), and whoever encrypts or hashes before
// they are there makes the kernel ask for them (see Modprobe).
func (d *daemon) plug(modalias string) {
	if strings.HasPrefix(modalias, "cpu:") {
		d.later = append(d.later, job{modalias: modalias})
		return
	}
	d.urgent = append(d.urgent, job{modalias: modalias})
}

// modaliasPlaces are where sysfs shows the modaliases of devices: by bus, and by
// class for the few that are on none. That is a tenth of the files that a walk
// over all of /sys/devices opens.
var modaliasPlaces = []string{
	"bus/*/devices/*/modalias",
	"class/input/*/modalias",
	"class/dmi/*/modalias",
	"devices/system/cpu/modalias",
}

// coldplug queues the devices that are there, one of each kind.
func (d *daemon) coldplug() {
	kinds := modaliases(d.sysfs)
	d.devices += len(kinds)
	for _, m := range kinds {
		d.plug(m)
	}
}

func modaliases(sysfs string) []string {
	var kinds []string
	seen := map[string]bool{}
	for _, place := range modaliasPlaces {
		paths, _ := filepath.Glob(filepath.Join(sysfs, place)) // the pattern is sound
		slices.Sort(paths)
		for _, path := range paths {
			data, err := os.ReadFile(path)
			m := strings.TrimSpace(string(data))
			if err != nil || m == "" || seen[m] {
				continue // a device may go while we look
			}
			seen[m] = true
			kinds = append(kinds, m)
		}
	}
	return kinds
}
