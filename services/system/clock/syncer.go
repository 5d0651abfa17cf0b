package clock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/system/configuration"
	nodenet "github.com/garboard-os/garboard/services/system/network"
)

const (
	// saveEvery limits how much time a machine without a hardware clock loses at a boot, how far
	// servers set a clock back, and for how long a new machine takes any date of one server.
	saveEvery = time.Hour
	// farOff is how far servers that nobody else confirms may move the clock. Certificates and
	// tokens live for longer, and a machine without a hardware clock may be off for as long.
	farOff = 24 * time.Hour
	// retryFirst is the pause after the first round without an answer; it doubles
	// up to the usual interval. The network often works shortly after it is up.
	retryFirst = time.Second
	// reachLimit is the number of rounds without an answer, in a row, after which the clock
	// no longer counts as synchronised: RFC 5905 §9.2 keeps eight bits of reachability.
	reachLimit = 8
	// offer is the one server that those of DHCP count as.
	offer = "DHCP"
	// publicPool is the configuration's default: servers from DHCP are preferred.
	publicPool = "pool.ntp.org"
)

// syncer is one run of the service. Only one goroutine uses it.
type syncer struct {
	*Daemon
	h   *dag.Handle
	log *slog.Logger

	servers  []string
	offered  bool // by DHCP: nobody vouches for them
	disabled bool
	limit    time.Duration // of the wait for the first answer

	d              discipline
	refused        map[string]bool // addresses of servers that refused us
	rate           bool            // a server wants fewer requests
	fails          int             // rounds in a row
	serversChanged bool            // the servers were changed while running, and none has answered yet
	doubt          bool            // a server says that the clock is wrong, and isn't believed yet
	sure, since    time.Time       // the last time that nobody doubted, and when it was so (monotonic)
	lastErr        error
	unusable       []string
	status         Status
	started        bool
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	s := &syncer{Daemon: d, h: h, log: h.Log, refused: map[string]bool{}}
	if d.o.Mode == boot.Container {
		s.setStatus(Status{Synced: true, Source: SourceHost})
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
	s.sure, s.since = d.o.kernel.Now(), time.Now()
	s.setStatus(Status{Source: SourceNone, Message: "no answer yet"})
	defer s.save()
	return s.loop(ctx)
}

// configure asks changed servers at once.
func (s *syncer) configure(next *time.Timer) error {
	cfg, err := configuration.Config(s.o.Store)
	if err != nil {
		return err
	}
	t, former := cfg.Machine.Time, s.servers
	s.servers, s.offered = s.choose(t)
	if !slices.Equal(s.servers, former) || t.Disabled != s.disabled {
		clear(s.refused)
		s.rate, s.fails, s.serversChanged = false, 0, s.started
		next.Reset(0)
	}
	s.disabled, s.limit = t.Disabled, t.BootTimeout
	return nil
}

// choose returns the configured servers, or DHCP's if none are configured.
func (s *syncer) choose(t config.Time) (servers []string, offered bool) {
	offer, err := nodenet.TimeServers.Get(s.o.Store, nodenet.TimeServersID)
	if err != nil || len(offer.Spec) == 0 || len(t.Servers) > 0 && !slices.Equal(t.Servers, []string{publicPool}) {
		return t.Servers, false
	}
	return lists.Of(offer.Spec, netip.Addr.String), true
}

func (s *syncer) loop(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan []sample, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	changes := s.o.Store.Watch(ctx, configuration.Configs.Type(), nodenet.TimeServers.Type())
	save := time.NewTicker(saveEvery)
	defer save.Stop()
	next := time.NewTimer(0)
	defer next.Stop()
	err := s.configure(next)
	limit := time.NewTimer(s.limit)
	defer limit.Stop()
	asking, again := false, false
	void := false // the clock was set since the question
	for err == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-save.C:
			s.fresh = false
			s.save()
		case <-limit.C:
			s.startUnsynchronised()
		case o := <-s.orders:
			o.done <- s.obey(o.to)
			void = asking
			next.Reset(0)
		case <-next.C:
			if again = asking; !asking && s.start() {
				asking = true
				servers, offered, refused := s.servers, s.offered, maps.Clone(s.refused)
				wg.Go(func() { answers <- s.round(ctx, servers, offered, refused) })
			}
		case a := <-answers:
			if !void {
				s.take(a)
			}
			if next.Reset(s.pause()); again || void {
				next.Reset(0)
			}
			asking, void = false, false
		case <-changes:
			err = s.configure(next)
		}
	}
	return err
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

// round asks all addresses of all servers once. It runs beside the syncer's goroutine and
// uses none of its fields that change. Answers may come from any host, and be anything.
func (s *syncer) round(ctx context.Context, servers []string, offered bool, refused map[string]bool) (all []sample) {
	var mu sync.Mutex // guards all
	var wg sync.WaitGroup
	note := func(got sample, err error) {
		if err != nil {
			got.err = fmt.Errorf("%s: %w", got.addr, err)
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, got)
	}
	for _, server := range servers {
		wg.Go(func() {
			var addrs []string
			err := dag.Guard(s.log, func() (err error) { addrs, err = s.o.resolve(ctx, server); return err })
			if err != nil {
				note(sample{addr: server}, err)
			}
			for _, addr := range slices.DeleteFunc(addrs, func(addr string) bool { return refused[addr] }) {
				wg.Go(func() {
					var got sample
					err := dag.Guard(s.log, func() (err error) { got, err = s.o.query(ctx, addr); return err })
					if got.addr, got.server = addr, server; offered {
						got.server = offer
					}
					note(got, err)
				})
			}
		})
	}
	wg.Wait()
	return all
}

// take processes the answers of a round.
func (s *syncer) take(all []sample) {
	s.handleRefusals(all)
	best, err := pick(all)
	s.unusable = unusable(all, best)
	slices.Sort(s.unusable) // they came as they answered
	if err == nil {
		if err = s.judge(best); err != nil {
			s.d.poll, s.d.counter = min(s.d.poll, minPoll), 0 // soon it is clear who is wrong
		}
		s.doubt = err != nil
	}
	if err == nil {
		s.fails, s.serversChanged, s.lastErr = 0, false, nil
		err = s.follow(best)
	}
	if err != nil {
		s.failed(err)
		return
	}
	s.up(fmt.Sprintf("synchronised with %s, the clock was off by %s", best.addr, best.offset.Round(time.Millisecond)))
}

// handleRefusals does what servers that refuse us ask for (RFC 5905 §7.4).
func (s *syncer) handleRefusals(all []sample) {
	for _, a := range all {
		var r refusal
		if !errors.As(a.err, &r) {
			continue
		}
		if r.code == "RATE" {
			s.rate = true
			continue
		}
		s.refused[a.addr] = true
		s.log.Warn(fmt.Sprintf("time server %s refuses us (%s): leaving it alone", a.addr, r.code))
	}
}

// follow moves the clock.
func (s *syncer) follow(best sample) error {
	before := s.d.synced
	what := s.d.decide(best.offset, time.Now())
	s.doubt = what == wait
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
		}
	case pull:
		err = slew(s.o.kernel, best.offset, best.distance, s.d.jitter, s.d.poll, best.leap)
	}
	if err != nil {
		return err
	}
	if !s.doubt && (s.fresh || best.voices > 1) {
		s.sure, s.since = s.o.kernel.Now(), time.Now()
	}
	if s.fresh = s.fresh && s.doubt; what == step || !before {
		s.save()
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
		s.log.Warn(fmt.Sprintf("the new time servers bring no time (%s); asking %s again", logs.OneLine(err.Error()), strings.Join(s.servers, ", ")))
	} else {
		s.log.Info("no time: " + logs.OneLine(err.Error()))
	}
	if s.d.synced && s.fails < reachLimit {
		s.setStatus(s.status)
		return
	}
	if s.d.synced {
		s.log.Warn(fmt.Sprintf("the last %d questions to %s brought no time: the clock runs on its own now (%s)",
			s.fails, strings.Join(s.servers, ", "), logs.OneLine(err.Error())))
		s.d.synced = false
	}
	status := s.status
	status.Synced, status.Message, status.Reason = false, logs.OneLine(err.Error()), reason.Of(err)
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
		why = logs.OneLine(s.lastErr.Error())
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
	status.Floor, status.Unusable = s.floor, s.unusable
	s.status = status
	if err := Statuses.Put(s.o.Store.As(ID), StatusID, status); err != nil {
		s.log.Warn(err.Error())
	}
}

// save keeps the latest time that is certain for the next boot. That of the hardware clock alone isn't: it goes on by
// itself, and may be wrong. Nor is one that a server contradicts. That something was saved also says that this machine
// isn't new.
func (s *syncer) save() {
	if s.fresh {
		return
	}
	if now := s.o.kernel.Now(); !s.doubt && (s.raised || s.d.synced) && now.After(s.floor) {
		s.floor = now
	}
	if err := boot.WriteFile(s.o.file, []byte(stamp(s.floor)+"\n"), 0o644); err != nil {
		s.log.Warn("save the time: " + err.Error())
	}
	s.setStatus(s.status)
}
