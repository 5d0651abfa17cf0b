// Package clock keeps the node's time.
//
// It is the service `timed`. The hardware clock of a machine may have any time,
// and every certificate depends on it. So the clock is first set to at least
// the time of the build, the time that was last saved on STATE, and the time
// from which the cluster's authorities are valid. Then time servers are asked.
// The clock is set once, and from then on only slewed, without steps. Time
// never blocks a boot: the wait for the first answer is limited, and the
// quality of the time can be read as a resource.
//
// No server sets the clock to before the floor, and one alone moves it by a day at
// most, except on a new machine (judge.go). The operator may do more.
//
// In a container the clock is the host's, and never changed.
package clock

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"golang.org/x/sys/unix"
)

const (
	// ID of the service.
	ID = "timed"
	// StatusID is the ID of the only status.
	StatusID = "node"
)

// Source is where the time of the node comes from.
type Source string

const (
	SourceNone Source = "none" // the hardware clock, or the clock's floor
	SourceNTP  Source = "ntp"
	SourceHost Source = "host" // a container node: the host's operator is responsible for it
)

// Status is the quality of the node's time.
type Status struct {
	Synced  bool   `yaml:"synced" column:"SYNCED"`
	Source  Source `yaml:"source" column:"SOURCE"`
	Server  string `yaml:"server,omitempty" column:"SERVER"`
	Stratum int    `yaml:"stratum,omitempty"`
	// Offset is the error of the clock at the last answer.
	Offset time.Duration `yaml:"offset,omitempty" column:"OFFSET"`
	// MaxError is the largest possible error of the server (root distance, RFC 5905 §11.2).
	MaxError time.Duration `yaml:"maxError,omitempty"`
	Jitter   time.Duration `yaml:"jitter,omitempty"`
	Poll     time.Duration `yaml:"poll,omitempty"` // until the next query
	LastSync time.Time     `yaml:"lastSync,omitempty"`
	Message  string        `yaml:"message,omitempty"` // why it isn't synced
	Reason   reason.Code   `yaml:"reason,omitempty"`
	// Unusable are the servers that said no time when they were asked last, or another one than the majority, and why.
	Unusable []string `yaml:"unusable,omitempty"`
	// Floor is a time that is over for certain: no server sets the clock to before it.
	Floor time.Time `yaml:"floor,omitempty"`
}

// Statuses has one object, "node".
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "TimeStatuses.v1alpha1.garboard.dev",
	Kind:      "TimeStatus",
	Namespace: "runtime",
})

// kernel is the clock to synchronise: the machine's, or a test's.
type kernel interface {
	Now() time.Time
	Set(t time.Time) error
	Adjust(tx *unix.Timex) error
}

// Options are the inputs of the service.
type Options struct {
	Mode  boot.Mode
	Store *resource.Store

	kernel kernel
	file   string // the saved time; tests have their own
	built  time.Time
	// Tests have other servers.
	resolve func(ctx context.Context, server string) (addrs []string, err error)
	query   func(ctx context.Context, addr string) (sample, error)
}

// Daemon is the service.
type Daemon struct {
	o      Options
	orders chan order
	raised bool      // the hardware clock of this boot was behind the floor
	floor  time.Time // what was saved last, or is known otherwise
	fresh  bool      // nothing was saved yet: the machine is new
}

// New makes the service and doesn't start it.
func New(o Options) *Daemon {
	if o.kernel == nil {
		o.kernel, o.resolve = machineClock{}, resolve
		o.query = func(ctx context.Context, addr string) (sample, error) { return query(ctx, addr, nil) }
	}
	option.Default(&o.file, boot.ClockFile)
	option.Default(&o.built, boot.Built())
	return &Daemon{o: o, orders: make(chan order)}
}

// Service is timed in the graph: up when the clock is set, or when the wait for
// that has taken too long.
func (d *Daemon) Service() dag.Service {
	return dag.Service{
		ID:      ID,
		Run:     d.run,
		Restart: dag.RestartAlways,
	}
}
