package logship

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// Pauses between attempts double from the first to the last.
	firstPause = time.Second
	lastPause  = 30 * time.Second
	// flushBudget is what a destination gets to send what is left when it ends.
	flushBudget = 2 * time.Second
	// batchBytes bounds what is sent at once, and so what a destination holds itself.
	batchBytes = 128 << 10
	warning    = 4 // of syslog(3)
)

// settings are what the configuration has about a destination.
type settings struct {
	config.LogDestination
	env map[string]string // machine.env, for proxies
}

// destination sends the feed to one server.
type destination struct {
	settings
	o       Options
	log     *slog.Logger
	name    string
	changed chan<- struct{}
	stop    func() // stops the goroutine and waits for it

	// Only the goroutine uses these; they outlive it when settings change.
	reader logs.Reader[logs.Record]
	batch  []logs.Record // taken from the feed, and not sent yet
	pause  time.Duration // after the next failure; 0: the first

	mu    sync.Mutex // guards state
	state Destination
}

func (d *destination) status() Destination {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.Format = d.Format
	return d.state
}

// run sends until ctx ends, and then what is left within flushBudget.
func (d *destination) run(ctx context.Context) {
	hard, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(d.o.flush, cancel) })()
	for {
		err := d.session(ctx, hard)
		if err == nil {
			return
		}
		d.works(false, err.Error())
		d.pause = sleep.Longer(d.pause, d.o.first, lastPause)
		if !sleep.For(ctx, d.pause) {
			return
		}
	}
}

// session sends over one connection. It returns nil when ctx has ended and all is sent.
func (d *destination) session(ctx, hard context.Context) error {
	t, err := d.open(ctx, hard)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer t.close()
	for {
		d.fill()
		if len(d.batch) == 0 && ctx.Err() != nil {
			return nil
		}
		select {
		case <-t.ended():
			return errEnded
		default:
		}
		if len(d.batch) == 0 {
			_ = d.reader.Wait(ctx, t.ended()) // the loop looks at ctx
			sleep.For(ctx, d.collect())
			continue
		}
		sent, err := t.send(hard, d.batch)
		d.sent(sent)
		switch {
		case errors.Is(err, errRefused):
			d.refused(err)
		case err != nil:
			return err
		}
	}
}

// fill takes the next lines of the feed, if none are left to be sent.
func (d *destination) fill() {
	if len(d.batch) > 0 {
		return
	}
	records, lost := d.reader.Next(batchBytes)
	d.batch = records
	if lost > 0 {
		d.mu.Lock()
		d.state.Dropped += lost
		d.mu.Unlock()
		d.batch = append([]logs.Record{{
			Time: time.Now(), Facility: logs.FacilityService, Service: LogID, Level: warning,
			Message: fmt.Sprintf("%d lines are missing here: the destination was too slow, or couldn't be reached", lost),
		}}, records...)
	}
}

// host is the node's name, as far as it is known.
func (d *destination) host() string {
	name, err := network.Hostnames.Get(d.o.Store, network.HostnameID)
	if err != nil {
		return ""
	}
	return name.Spec
}

// sent notes that the first n lines of the batch have left.
func (d *destination) sent(n int) {
	if n == 0 {
		return
	}
	d.batch, d.pause = d.batch[n:], 0
	d.mu.Lock()
	d.state.Sent += uint64(n)
	d.mu.Unlock()
	d.works(true, "")
}

// refused drops the batch: the server will never accept it.
func (d *destination) refused(why error) {
	d.mu.Lock()
	d.state.Dropped += uint64(len(d.batch))
	d.mu.Unlock()
	d.batch = nil
	d.works(false, why.Error())
}

// works notes whether sending works, and reports when that changes.
func (d *destination) works(sending bool, why string) {
	d.mu.Lock()
	before := d.state
	if why != "" {
		d.state.Error = why
	}
	if sending == before.Sending && !before.Since.IsZero() {
		d.mu.Unlock()
		return
	}
	d.state.Sending, d.state.Since = sending, time.Now()
	d.mu.Unlock()
	if sending {
		d.log.Info("sends logs", slog.String("to", d.name))
	} else {
		d.log.Warn("can't send logs", slog.String("to", d.name), slog.String("err", why))
	}
	sleep.Wake(d.changed)
}
