// Package logship sends the logs of the node to other machines
// (machine.logging.destinations): those of services, of the kernel, and the API server's
// audit log.
//
//	service logs ─┐
//	kernel ───────┼─► logs.Feed ─► one goroutine for each destination ─► tcp, tls, udp, http
//	audit log ────┘
//
// Nothing waits for a destination: the feed is bounded, and a destination that falls
// behind loses the oldest lines. It counts them, sends the count, and LogDestinations
// shows it. A batch that couldn't be sent is sent again, so after an interrupted
// connection some lines may come twice. TCP doesn't report which lines a server has
// read: those that were on their way may be missing then.
package logship

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// LogID is the log of this package.
	LogID = "logforward"
	// publishEvery is how often the counters are published. A destination that fails, or
	// works again, is published at once.
	publishEvery = 5 * time.Second
)

// Destination is what became of the lines for one server.
type Destination struct {
	Format  config.LogFormat `yaml:"format" column:"FORMAT"`
	Sending bool             `yaml:"sending" column:"SENDING"` // the last attempt succeeded
	// Since is when that began; zero: nothing was sent yet.
	Since   time.Time `yaml:"since" column:"SINCE"`
	Sent    uint64    `yaml:"sent" column:"SENT"`       // lines
	Dropped uint64    `yaml:"dropped" column:"DROPPED"` // lines that were too many to wait, or that the server refused
	// Error is the last failure; it stays after it was solved.
	Error string `yaml:"error,omitempty" column:"ERROR"`
}

// Destinations are those of the configuration, by endpoint.
var Destinations = resource.Define[Destination](resource.Definition{
	Type: "LogDestinations.runtime.garboard.dev", Kind: "LogDestination", Namespace: "runtime",
})

// Options are what the forwarder stands on.
type Options struct {
	Store *resource.Store
	Logs  *logs.Logs
	// AuditLog is the API server's audit log.
	AuditLog string

	// What tests have in another way.
	first time.Duration
	flush time.Duration
}

// Forwarder sends the logs. It isn't a service of the graph, so that it still sends what
// services log when they stop.
type Forwarder struct {
	o       Options
	log     *slog.Logger
	changed chan struct{} // a destination fails, or works again
	sources func()        // stops the sources and waits for them; nil: they don't run
	running map[string]*destination
}

// New returns a forwarder; Run runs it.
func New(o Options) *Forwarder {
	o.first = cmp.Or(o.first, firstPause)
	o.flush = cmp.Or(o.flush, flushBudget)
	return &Forwarder{o: o, log: o.Logs.Logger(LogID), changed: make(chan struct{}, 1), running: map[string]*destination{}}
}

// Run forwards until ctx ends, and then for flushBudget at most.
func (f *Forwarder) Run(ctx context.Context) {
	configs := f.o.Store.Watch(ctx, configuration.Configs.Type())
	tick := time.NewTicker(publishEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			f.set(nil)
			return
		case <-configs:
			if cfg, err := configuration.Config(f.o.Store); err == nil {
				f.set(cfg)
			}
		case <-f.changed:
		case <-tick.C:
		}
		f.publish()
	}
}

// set makes the destinations those of cfg; nil: none.
func (f *Forwarder) set(cfg *config.Config) {
	wanted := map[string]settings{}
	if cfg != nil {
		for _, d := range cfg.Machine.Logging.Destinations {
			wanted[d.Name()] = settings{LogDestination: d, env: cfg.Machine.Env}
		}
	}
	var stopping sync.WaitGroup
	for name, r := range f.running {
		if next, still := wanted[name]; !still || !reflect.DeepEqual(next, r.settings) {
			stopping.Go(r.stop)
			r.stop = nil
		}
	}
	stopping.Wait()
	from := f.o.Logs.Feed().Read()
	for name, r := range f.running {
		if _, still := wanted[name]; !still {
			from = r.reader // one in its place goes on there
			delete(f.running, name)
		}
	}
	if len(wanted) > 0 {
		f.o.Logs.Feed().Keep(true)
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		f.start(name, wanted[name], from)
	}
	switch {
	case len(wanted) > 0 && f.sources == nil:
		f.sources = f.startSources()
	case len(wanted) == 0:
		if f.sources != nil {
			f.sources()
			f.sources = nil
		}
		f.o.Logs.Feed().Keep(false)
	}
}

// start starts a destination, or starts it again with other settings: it then continues
// where it was.
func (f *Forwarder) start(name string, s settings, from logs.Reader[logs.Record]) {
	r := f.running[name]
	if r == nil {
		r = &destination{o: f.o, log: f.log, name: name, reader: from, changed: f.changed}
		f.running[name] = r
	}
	if r.stop != nil {
		return
	}
	r.settings = s
	r.stop = background.Start(context.Background(), func(ctx context.Context) {
		for range sleep.Every(ctx, lastPause) {
			// What servers answer is input from outside.
			if dag.Guard(f.log, func() error { r.run(ctx); return nil }) == nil {
				return
			}
		}
	})
}

// publish shows the state of all destinations.
func (f *Forwarder) publish() {
	now := map[string]Destination{}
	for name, r := range f.running {
		now[name] = r.status()
	}
	if err := Destinations.Replace(f.o.Store.As(LogID), now); err != nil {
		f.log.Warn(err.Error())
	}
}
