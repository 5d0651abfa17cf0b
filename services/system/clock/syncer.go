package clock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/system/machine"
	nodenet "github.com/garboard-os/garboard/services/system/network"
)

const (
	// saveEvery limits how much time a machine without a hardware clock loses at a boot.
	saveEvery = 5 * time.Minute
	// bootTimeout is for a configuration without one (Load fills it in).
	bootTimeout = 15 * time.Second
	// retryFirst is the pause after the first round without an answer; it doubles
	// up to the usual interval. The network often works shortly after it is up.
	retryFirst = time.Second
	// reachLimit is the number of rounds without an answer, in a row, after which the clock
	// no longer counts as synchronised: RFC 5905 §9.2 keeps eight bits of reachability.
	reachLimit = 8
	// publicPool is the configuration's default: servers from DHCP are preferred.
	publicPool = "pool.ntp.org"
)

// syncer is one run of the service. Only one goroutine uses it.
type syncer struct {
	*Daemon
	h   *dag.Handle
	log *slog.Logger

	servers  []string
	disabled bool
	limit    time.Duration // of the wait for the first answer

	d              discipline
	refused        map[string]bool // addresses of servers that refused us
	rate           bool            // a server wants fewer requests
	fails          int             // rounds in a row
	serversChanged bool            // the servers were changed while running, and none has answered yet
	lastErr        error
	status         Status
	started        bool
}

// answer is the result of a round.
type answer struct {
	samples []sample
	err     error
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	s := &syncer{Daemon: d, h: h, log: h.Log, refused: map[string]bool{}}
	if d.o.Mode == boot.Container {
		if err := s.publish(Status{Synced: true, Source: SourceHost}); err != nil {
			return err
		}
		h.Started("the clock is the host's")
		<-ctx.Done()
		return nil
	}
	raised, err := d.raise()
	if err != nil {
		s.log.Warn(err.Error())
	}
	if raised != "" {
		s.log.Warn(raised)
	}
	defer s.save()
	if _, err := s.configure(); err != nil {
		return err
	}
	return s.loop(ctx)
}

// configure reports whether the servers changed.
func (s *syncer) configure() (changed bool, err error) {
	cfg, err := machine.Config(s.o.Store)
	if err != nil {
		return false, err
	}
	t := cfg.Machine.Time
	servers := s.choose(t)
	changed = !slices.Equal(servers, s.servers) || t.Disabled != s.disabled
	s.servers, s.disabled, s.limit = servers, t.Disabled, t.BootTimeout
	if s.limit <= 0 {
		s.limit = bootTimeout
	}
	return changed, nil
}

// choose returns the configured servers, or DHCP's if none are configured.
func (s *syncer) choose(t config.Time) []string {
	if len(t.Servers) > 0 && !slices.Equal(t.Servers, []string{publicPool}) {
		return t.Servers
	}
	offered, err := nodenet.TimeServers.Get(s.o.Store, nodenet.TimeServersID)
	if err != nil || len(offered.Spec) == 0 {
		return t.Servers
	}
	var out []string
	for _, a := range offered.Spec {
		out = append(out, a.String())
	}
	return out
}

func (s *syncer) loop(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan answer, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	configs := s.o.Store.Watch(ctx, machine.Configs.Type())
	offers := s.o.Store.Watch(ctx, nodenet.TimeServers.Type())
	save := time.NewTicker(saveEvery)
	defer save.Stop()
	limit := time.NewTimer(s.limit)
	defer limit.Stop()
	next := time.NewTimer(0)
	defer next.Stop()
	asking, again := false, false
	for {
		changed := false
		select {
		case <-ctx.Done():
			return nil
		case <-save.C:
			s.save()
		case <-limit.C:
			s.startUnsynchronised()
		case <-next.C:
			if again = asking; !asking && s.start() {
				asking = true
				servers, refused := s.servers, maps.Clone(s.refused)
				wg.Go(func() { answers <- s.round(ctx, servers, refused) })
			}
		case a := <-answers:
			asking = false
			s.take(a)
			if next.Reset(s.pause()); again {
				next.Reset(0)
			}
		case <-configs:
			changed = true
		case <-offers:
			changed = true
		}
		if !changed {
			continue
		}
		different, err := s.configure()
		if err != nil {
			return err
		}
		if different {
			clear(s.refused)
			s.rate, s.fails, s.serversChanged = false, 0, s.started
			next.Reset(0)
		}
	}
}

// start returns false if there is no server to ask; then the service is up.
func (s *syncer) start() bool {
	why := ""
	switch {
	case s.disabled:
		why = "machine.time.disabled is set"
	case len(s.servers) == 0:
		why = "there are no time servers"
	default:
		return true
	}
	s.setStatus(Status{Source: SourceNone, Message: why})
	s.up("trusting the hardware clock: " + why)
	return false
}

// round asks all servers once. It runs beside the syncer's goroutine and uses none of its
// fields that change.
func (s *syncer) round(ctx context.Context, servers []string, refused map[string]bool) answer {
	skip := func(addr string) bool { return refused[addr] }
	var (
		mu   sync.Mutex // guards a
		a    answer
		errs []error
		wg   sync.WaitGroup
	)
	for _, server := range servers {
		wg.Go(func() {
			var samples []sample
			err := dag.Guard(s.log, func() (err error) {
				samples, err = s.o.ask(ctx, server, s.o.kernel.Now, skip)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			a.samples = append(a.samples, samples...)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	a.err = errors.Join(errs...)
	return a
}

// take processes the answer of a round.
func (s *syncer) take(a answer) {
	s.handleRefusals(a.err)
	best, err := pick(a.samples)
	if err != nil && !errors.Is(err, errDisagree) && a.err != nil {
		err = a.err // the reason why there was no answer is more useful
	}
	if now := s.o.kernel.Now(); err == nil && now.Add(best.offset).Before(s.o.built) {
		err = fmt.Errorf("by %s it is %s, and this system was built later", best.addr, stamp(now.Add(best.offset)))
	}
	if err != nil {
		s.failed(err)
		return
	}
	s.fails, s.serversChanged, s.lastErr = 0, false, nil
	if err := s.follow(best); err != nil {
		s.failed(err)
		return
	}
	s.up(fmt.Sprintf("synchronised with %s, the clock was off by %s", best.addr, best.offset.Round(time.Millisecond)))
}

// handleRefusals does what servers that refuse us ask for (RFC 5905 §7.4).
func (s *syncer) handleRefusals(err error) {
	for _, e := range flatten(err) {
		var from askError
		var r refusal
		if !errors.As(e, &from) || !errors.As(e, &r) {
			continue
		}
		if r.code == "RATE" {
			s.rate = true
			continue
		}
		s.refused[from.addr] = true
		s.log.Warn(fmt.Sprintf("time server %s refuses us (%s): leaving it alone", from.addr, r.code))
	}
}

// flatten lists the errors that errors.Join joined.
func flatten(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var out []error
	for _, e := range joined.Unwrap() {
		out = append(out, flatten(e)...)
	}
	return out
}

// follow moves the clock.
func (s *syncer) follow(best sample) error {
	before := s.d.synced
	what := s.d.decide(best.offset, time.Now())
	var err error
	switch what {
	case wait:
		s.log.Warn(fmt.Sprintf("the clock is off by %s according to %s: setting it if it stays like that for %s",
			best.offset.Round(time.Millisecond), best.addr, stepOut))
	case step:
		now := s.o.kernel.Now()
		if err = s.o.kernel.Set(now.Add(best.offset)); err == nil {
			err = slew(s.o.kernel, 0, best.distance, s.d.jitter, s.d.poll, best.leap)
			s.log.Info(fmt.Sprintf("clock set from %s to %s by %s", stamp(now), stamp(now.Add(best.offset)), best.addr))
			s.save()
		}
	case pull:
		err = slew(s.o.kernel, best.offset, best.distance, s.d.jitter, s.d.poll, best.leap)
	}
	if err != nil {
		return err
	}
	if !before && s.started {
		s.log.Warn(fmt.Sprintf("time is synchronised now, with %s", best.addr))
	}
	s.setStatus(Status{
		Synced: true, Source: SourceNTP, Server: best.addr, Stratum: best.stratum, Offset: best.offset,
		MaxError: best.distance, Jitter: s.d.jitter, Poll: s.pause(), LastSync: s.o.kernel.Now(),
	})
	return nil
}

func (s *syncer) failed(err error) {
	s.fails++
	s.lastErr = err
	if s.serversChanged && s.fails == 1 {
		s.log.Warn(fmt.Sprintf("the new time servers bring no time (%s); asking %s again", oneLine(err), strings.Join(s.servers, ", ")))
	} else {
		s.log.Info("no time: " + oneLine(err))
	}
	if s.d.synced && s.fails < reachLimit {
		return
	}
	if s.d.synced {
		s.log.Warn(fmt.Sprintf("the last %d questions to %s brought no time: the clock runs on its own now (%s)",
			s.fails, strings.Join(s.servers, ", "), oneLine(err)))
		s.d.synced = false
	}
	status := s.status
	status.Synced, status.Message, status.Reason = false, oneLine(err), reason.Of(err)
	status.Source = cmp.Or(status.Source, SourceNone)
	s.setStatus(status)
}

// pause until the next round.
func (s *syncer) pause() time.Duration {
	usual := s.d.interval()
	if s.rate {
		usual = time.Second << maxPoll
	}
	if s.d.synced && !s.serversChanged || s.fails == 0 || s.fails > minPoll {
		return usual
	}
	return min(retryFirst<<(s.fails-1), usual)
}

// startUnsynchronised ends the wait for the first answer.
func (s *syncer) startUnsynchronised() {
	if s.started {
		return
	}
	why := "no answer yet"
	if s.lastErr != nil {
		why = oneLine(s.lastErr)
	}
	s.log.Warn(fmt.Sprintf("time isn't synchronised after %s (%s); going on with the clock at %s, and asking %s again at least every %s. "+
		"A time server that this network reaches, in machine.time.servers, ends this",
		s.limit, why, stamp(s.o.kernel.Now()), strings.Join(s.servers, ", "), s.d.interval()))
	s.up("not synchronised: " + why)
}

func (s *syncer) up(message string) {
	if !s.started {
		s.started = true
		s.h.Started(message)
	}
}

func (s *syncer) setStatus(status Status) {
	if err := s.publish(status); err != nil {
		s.log.Warn(err.Error())
	}
}

func (s *syncer) publish(status Status) error {
	s.status = status
	return Statuses.Put(s.o.Store.As(ID), StatusID, status)
}

// save keeps the time for the next boot, unless it is only that of the hardware clock: that goes on by itself, and one that is wrong can be set.
func (s *syncer) save() {
	if !s.raised && !s.d.synced {
		return
	}
	if err := s.Daemon.save(); err != nil {
		s.log.Warn(err.Error())
	}
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
