package clock

import (
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
	"github.com/garboard-os/garboard/services/system/machine"
	nodenet "github.com/garboard-os/garboard/services/system/network"
)

const (
	// saveEvery bounds how far back a machine without a hardware clock falls.
	saveEvery = 5 * time.Minute
	// bootTimeout is for a configuration without one (Load fills it in).
	bootTimeout = 15 * time.Second
	// retryFirst is the pause after the first round without an answer; it doubles
	// up to the usual interval. The network often works a moment after it is up.
	retryFirst = time.Second
	// reachLimit is how many rounds without an answer, in a row, end the claim to
	// be synchronised: RFC 5905 §9.2 keeps eight bits of reachability.
	reachLimit = 8
	// publicPool is what the configuration has where nobody chose servers: what
	// DHCP says is better than that.
	publicPool = "pool.ntp.org"
)

// keeper is one run of the service: all of it belongs to one goroutine.
type keeper struct {
	*Daemon
	h   *dag.Handle
	log *slog.Logger

	servers  []string
	disabled bool
	limit    time.Duration // of the wait for the first answer

	d       discipline
	refused map[string]bool // addresses that don't want us
	rate    bool            // a server wants fewer questions
	fails   int             // rounds in a row
	fresh   bool            // the servers were changed while running, and none has answered yet
	lastErr error
	status  Status
	started bool
}

// answer of a round.
type answer struct {
	samples []sample
	err     error
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	k := &keeper{Daemon: d, h: h, log: h.Log, refused: map[string]bool{}}
	if d.o.Mode == boot.Container {
		if err := k.publish(Status{Synced: true, Source: SourceHost}); err != nil {
			return err
		}
		h.Started("the clock is the host's")
		<-ctx.Done()
		return nil
	}
	raised, err := d.raise()
	if err != nil {
		k.log.Warn(err.Error())
	}
	if raised != "" {
		k.log.Warn(raised)
	}
	defer k.save()
	if _, err := k.configure(); err != nil {
		return err
	}
	return k.loop(ctx)
}

// configure reports whether the servers changed.
func (k *keeper) configure() (changed bool, err error) {
	cfg, err := machine.Config(k.o.Store)
	if err != nil {
		return false, err
	}
	t := cfg.Machine.Time
	servers := k.choose(t)
	changed = !slices.Equal(servers, k.servers) || t.Disabled != k.disabled
	k.servers, k.disabled, k.limit = servers, t.Disabled, t.BootTimeout
	if k.limit <= 0 {
		k.limit = bootTimeout
	}
	return changed, nil
}

// choose takes the configured servers, or DHCP's where nobody configured any.
func (k *keeper) choose(t config.Time) []string {
	if len(t.Servers) > 0 && !slices.Equal(t.Servers, []string{publicPool}) {
		return t.Servers
	}
	offered, err := nodenet.TimeServers.Get(k.o.Store, nodenet.TimeServersID)
	if err != nil || len(offered.Spec) == 0 {
		return t.Servers
	}
	var out []string
	for _, a := range offered.Spec {
		out = append(out, a.String())
	}
	return out
}

func (k *keeper) loop(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan answer, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	configs := k.o.Store.Watch(ctx, machine.Configs.Type())
	offers := k.o.Store.Watch(ctx, nodenet.TimeServers.Type())
	save := time.NewTicker(saveEvery)
	defer save.Stop()
	limit := time.NewTimer(k.limit)
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
			k.save()
		case <-limit.C:
			k.goOn()
		case <-next.C:
			if again = asking; !asking && k.start() {
				asking = true
				servers, refused := k.servers, maps.Clone(k.refused)
				wg.Go(func() { answers <- k.round(ctx, servers, refused) })
			}
		case a := <-answers:
			asking = false
			k.take(a)
			if next.Reset(k.pause()); again {
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
		different, err := k.configure()
		if err != nil {
			return err
		}
		if different {
			clear(k.refused)
			k.rate, k.fails, k.fresh = false, 0, k.started
			next.Reset(0)
		}
	}
}

// start is false where there is nobody to ask; the service is up then.
func (k *keeper) start() bool {
	why := ""
	switch {
	case k.disabled:
		why = "machine.time.disabled is set"
	case len(k.servers) == 0:
		why = "there are no time servers"
	default:
		return true
	}
	k.tell(Status{Source: SourceNone, Message: why})
	k.up("trusting the hardware clock: " + why)
	return false
}

// round asks all servers once. It runs beside the keeper's goroutine and touches
// nothing of its own.
func (k *keeper) round(ctx context.Context, servers []string, refused map[string]bool) answer {
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
			err := dag.Guard(k.log, func() (err error) {
				samples, err = k.o.ask(ctx, server, k.o.kernel.Now, skip)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			a.samples = append(a.samples, samples...)
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	a.err = errors.Join(errs...)
	return a
}

// take draws the consequences of a round.
func (k *keeper) take(a answer) {
	k.heed(a.err)
	best, err := pick(a.samples)
	if err != nil && !errors.Is(err, errDisagree) && a.err != nil {
		err = a.err // why there was no answer says more
	}
	if now := k.o.kernel.Now(); err == nil && now.Add(best.offset).Before(k.o.built) {
		err = fmt.Errorf("%s says it is %s, and this system was built later", best.addr, stamp(now.Add(best.offset)))
	}
	if err != nil {
		k.failed(err)
		return
	}
	k.fails, k.fresh, k.lastErr = 0, false, nil
	if err := k.follow(best); err != nil {
		k.failed(err)
		return
	}
	k.up(fmt.Sprintf("synchronised with %s, the clock was off by %s", best.addr, best.offset.Round(time.Millisecond)))
}

// heed does what servers that refuse us ask for (RFC 5905 §7.4).
func (k *keeper) heed(err error) {
	for _, e := range flatten(err) {
		var from askError
		var r refusal
		if !errors.As(e, &from) || !errors.As(e, &r) {
			continue
		}
		if r.code == "RATE" {
			k.rate = true
			continue
		}
		k.refused[from.addr] = true
		k.log.Warn(fmt.Sprintf("time server %s refuses us (%s): leaving it alone", from.addr, r.code))
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
func (k *keeper) follow(s sample) error {
	before := k.d.synced
	what := k.d.decide(s.offset, time.Now())
	var err error
	switch what {
	case wait:
		k.log.Warn(fmt.Sprintf("the clock is off by %s according to %s: setting it if it stays like that for %s",
			s.offset.Round(time.Millisecond), s.addr, stepOut))
	case step:
		now := k.o.kernel.Now()
		if err = k.o.kernel.Set(now.Add(s.offset)); err == nil {
			err = slew(k.o.kernel, 0, s.distance, k.d.jitter, k.d.poll, s.leap)
			k.log.Info(fmt.Sprintf("clock set from %s to %s by %s", stamp(now), stamp(now.Add(s.offset)), s.addr))
			k.save()
		}
	case pull:
		err = slew(k.o.kernel, s.offset, s.distance, k.d.jitter, k.d.poll, s.leap)
	}
	if err != nil {
		return err
	}
	if !before && k.started {
		k.log.Warn(fmt.Sprintf("time is synchronised now, with %s", s.addr))
	}
	k.tell(Status{
		Synced: true, Source: SourceNTP, Server: s.addr, Stratum: s.stratum, Offset: s.offset,
		MaxError: s.distance, Jitter: k.d.jitter, Poll: k.pause(), LastSync: k.o.kernel.Now(),
	})
	return nil
}

func (k *keeper) failed(err error) {
	k.fails++
	k.lastErr = err
	if k.fresh && k.fails == 1 {
		k.log.Warn(fmt.Sprintf("the new time servers bring no time (%s); asking %s again", oneLine(err), strings.Join(k.servers, ", ")))
	} else {
		k.log.Info("no time: " + oneLine(err))
	}
	if k.d.synced && k.fails < reachLimit {
		return
	}
	if k.d.synced {
		k.log.Warn(fmt.Sprintf("the last %d questions to %s brought no time: the clock runs on its own now (%s)",
			k.fails, strings.Join(k.servers, ", "), oneLine(err)))
		k.d.synced = false
	}
	s := k.status
	s.Synced, s.Message = false, oneLine(err)
	if s.Source == "" {
		s.Source = SourceNone
	}
	k.tell(s)
}

// pause until the next round.
func (k *keeper) pause() time.Duration {
	usual := k.d.interval()
	if k.rate {
		usual = time.Second << maxPoll
	}
	if k.d.synced && !k.fresh || k.fails == 0 || k.fails > minPoll {
		return usual
	}
	return min(retryFirst<<(k.fails-1), usual)
}

// goOn ends the wait for the first answer.
func (k *keeper) goOn() {
	if k.started {
		return
	}
	why := "no answer yet"
	if k.lastErr != nil {
		why = oneLine(k.lastErr)
	}
	k.log.Warn(fmt.Sprintf("time isn't synchronised after %s (%s); going on with the clock at %s, and asking %s again at least every %s. "+
		"A time server that this network reaches, in machine.time.servers, ends this",
		k.limit, why, stamp(k.o.kernel.Now()), strings.Join(k.servers, ", "), k.d.interval()))
	k.up("not synchronised: " + why)
}

func (k *keeper) up(message string) {
	if !k.started {
		k.started = true
		k.h.Started(message)
	}
}

func (k *keeper) tell(s Status) {
	if err := k.publish(s); err != nil {
		k.log.Warn(err.Error())
	}
}

func (k *keeper) publish(s Status) error {
	k.status = s
	return Statuses.Put(k.o.Store.As(ID), StatusID, s)
}

func (k *keeper) save() {
	if err := k.Daemon.save(); err != nil {
		k.log.Warn(err.Error())
	}
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
