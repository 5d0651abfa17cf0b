package clock

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	nodenet "github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/timeserver"
	"github.com/vishvananda/netlink"
)

const (
	day  = 24 * time.Hour
	year = 365 * day
)

// world has time servers, and what each of them adds to the time.
type world struct {
	mu    sync.Mutex                 // guards lies
	lies  map[string][]time.Duration // one for each address
	alias map[string]string          // servers that share an address
}

func (w *world) say(server string, lies ...time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lies[server] = lies
}

// of has the node ask the world. An address is that of a server with a number.
func (w *world) of(c *fakeClock) Options {
	o := of(c, nil)
	o.resolve = func(_ context.Context, server string) (addrs []string, err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for i := range max(1, len(w.lies[server])) {
			addrs = append(addrs, cmp.Or(w.alias[server], fmt.Sprintf("%s-%d", server, i)))
		}
		return addrs, nil
	}
	o.query = func(_ context.Context, addr string) (sample, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for server, lies := range w.lies {
			for i, lie := range lies {
				if addr == w.alias[server] || addr == fmt.Sprintf("%s-%d", server, i) {
					return answer(c.Now(), lie), nil
				}
			}
		}
		_, err := silence(addr)
		return sample{}, err
	}
	return o
}

// oldNode is a machine that has saved a time that long ago.
func oldNode(t *testing.T, w *world, ago, off time.Duration, servers ...string) *node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "clock")
	if err := os.WriteFile(file, []byte(stamp(time.Now().Add(-ago))+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := w.of(&fakeClock{off: off})
	o.file = file
	return startNode(t, o, config.Time{Servers: servers})
}

// saved is how far the saved time is from the right one.
func (n *node) saved() time.Duration {
	n.t.Helper()
	at, err := saved(n.file)
	if err != nil || at.IsZero() {
		n.t.Fatalf("nothing is saved: %v", err)
	}
	return time.Until(at).Round(time.Second)
}

// S-062: one stranger moves the clock by a day at most, two that agree move it further, and
// nobody to before the floor. Whatever they say, the node starts.
func TestHowFarServersMoveTheClock(t *testing.T) {
	type lies = map[string][]time.Duration
	for name, c := range map[string]struct {
		lies  lies
		alias map[string]string
		offer []string      // by DHCP, and nothing is configured
		off   time.Duration // the clock, at boot
		new   bool          // nothing was saved
		want  time.Duration
		why   reason.Code
	}{
		"one, a year ahead":              {lies: lies{"a": {year}}, want: 0, why: Unconfirmed},
		"one, ten hours ahead":           {lies: lies{"a": {10 * time.Hour}}, want: 10 * time.Hour},
		"one is right, after a long off": {lies: lies{"a": {0}}, off: -3 * day, want: -3 * day, why: Unconfirmed},
		"two are right":                  {lies: lies{"a": {0}, "b": {time.Millisecond}}, off: -3 * day, want: 0},
		"two agree on a year":            {lies: lies{"a": {year}, "b": {year}}, want: year},
		"two disagree":                   {lies: lies{"a": {year}, "b": {2 * year}}, want: 0, why: ServersDisagree},
		"one is right, one is silent":    {lies: lies{"a": {0}, "b": {}}, off: -3 * day, want: -3 * day, why: Unconfirmed},
		"one liar, and two are right":    {lies: lies{"a": {0}, "b": {0}, "c": {year}}, off: 3 * day, want: 0},
		"addresses of one name":          {lies: lies{"a": {year, year, year, year}}, want: 0, why: Unconfirmed},
		"names of one address": {
			lies: lies{"a": {year}, "b": {year}}, alias: map[string]string{"a": "192.0.2.1:123", "b": "192.0.2.1:123"}, want: 0, why: Unconfirmed,
		},
		"DHCP's": {
			lies: lies{"192.0.2.1": {year}, "192.0.2.2": {year}}, offer: []string{"192.0.2.1", "192.0.2.2"}, want: 0, why: Unconfirmed,
		},
		"DHCP's, an hour":       {lies: lies{"192.0.2.1": {time.Hour}, "192.0.2.2": {time.Hour}}, offer: []string{"192.0.2.1", "192.0.2.2"}, want: time.Hour},
		"two, before the floor": {lies: lies{"a": {-30 * day}, "b": {-30 * day}}, want: 0, why: Impossible},
		"two, a week back":      {lies: lies{"a": {0}, "b": {0}}, off: 7 * day, want: 0},
		"one, a week back":      {lies: lies{"a": {0}}, off: 7 * day, want: 7 * day, why: Unconfirmed},
		"one, new machine":      {lies: lies{"a": {0}}, off: -30 * year, new: true, want: 0},
		"DHCP's, new machine":   {lies: lies{"192.0.2.1": {0}}, offer: []string{"192.0.2.1"}, off: -100 * day, new: true, want: 0},
		"new, and before built": {lies: lies{"a": {-2 * year}}, new: true, want: 0, why: Impossible},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{lies: c.lies, alias: c.alias}
				var servers []string
				for server := range c.lies {
					servers = append(servers, server)
				}
				if c.offer != nil {
					servers = nil
				}
				var n *node
				if c.new {
					n = startNode(t, w.of(&fakeClock{off: c.off}), config.Time{Servers: servers})
				} else {
					n = oldNode(t, w, 20*day, c.off, servers...)
				}
				if c.offer != nil {
					if err := nodenet.TimeServers.Put(n.store.As("networkd"), nodenet.TimeServersID, addrs(c.offer...)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(stepOut + 2*time.Hour) // virtual
				synctest.Wait()
				s := n.status()
				if off := n.clock.error().Round(time.Second); !n.up() || off != c.want || s.Synced != (c.why == "") || s.Reason != c.why {
					t.Errorf("up %v, off by %s, want %s; %+v\n%s", n.up(), off, c.want, s, n.log)
				}
				want := map[reason.Code]string{Unconfirmed: "gbctl time set", Impossible: "gbctl time set"}[c.why]
				if c.new && c.why == Impossible {
					want = "this system was built then" // the operator can't do that, either
				}
				if !strings.Contains(s.Message, want) {
					t.Errorf("it says %q", s.Message)
				}
				n.stop()
			})
		})
	}
}

// A clock that was right for long believes one server no more than one at its start.
func TestALiarLater(t *testing.T) {
	for name, fresh := range map[string]bool{"an old machine": false, "a new one": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{lies: map[string][]time.Duration{"a": {0}}}
				n := (*node)(nil)
				if fresh {
					n = startNode(t, w.of(&fakeClock{off: -100 * day}), config.Time{Servers: []string{"a"}})
				} else {
					n = oldNode(t, w, time.Minute, 0, "a")
				}
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if off := n.clock.error(); off != 0 || !n.status().Synced {
					t.Fatalf("off by %s", off)
				}
				w.say("a", year)
				time.Sleep(3 * stepOut)
				synctest.Wait()
				if s := n.status(); n.clock.error() != 0 || s.Synced || s.Reason != Unconfirmed {
					t.Errorf("off by %s, %+v", n.clock.error(), s)
				}
				w.say("a", 0)
				time.Sleep(stepOut)
				synctest.Wait()
				if s := n.status(); n.clock.error() != 0 || !s.Synced {
					t.Errorf("the liar is right again: off by %s, %+v", n.clock.error(), s)
				}
				w.say("a", 10*time.Hour)
				time.Sleep(3 * stepOut)
				synctest.Wait()
				if n.clock.error() != 10*time.Hour {
					t.Errorf("less than a day: off by %s\n%s", n.clock.error(), n.log)
				}
				n.stop()
			})
		})
	}
}

// After an hour, a machine isn't new any more, also where no server has answered.
func TestNewForAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{lies: map[string][]time.Duration{}}
		n := startNode(t, w.of(&fakeClock{}), config.Time{Servers: []string{"a"}})
		time.Sleep(saveEvery + time.Minute)
		w.say("a", year)
		time.Sleep(time.Hour)
		synctest.Wait()
		if off := n.clock.error(); off != 0 || n.status().Reason != Unconfirmed {
			t.Errorf("off by %s, %+v", off, n.status())
		}
		n.stop()
		// Nobody has confirmed its hardware clock: what is saved is known otherwise.
		if at, err := saved(n.file); err != nil || !at.Equal(beforeSynctest) {
			t.Errorf("saved: %s, %v", at, err)
		}
		o := w.of(&fakeClock{})
		o.file = n.file
		again := startNode(t, o, config.Time{Servers: []string{"a"}})
		time.Sleep(time.Hour)
		synctest.Wait()
		if off := again.clock.error(); off != 0 {
			t.Errorf("off by %s after the next boot", off)
		}
		again.stop()
	})
}

// Steps of less than a day add up.
func TestStepsAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{lies: map[string][]time.Duration{"a": {0}, "b": {}}}
		n := oldNode(t, w, time.Hour, 0, "a", "b")
		for i := range 10 {
			w.say("a", time.Duration(i)*10*time.Hour)
			time.Sleep(2 * stepOut)
		}
		synctest.Wait()
		if off := n.clock.error().Round(time.Minute); off != 20*time.Hour {
			t.Errorf("one server has moved the clock by %s", off)
		}
		// Two that agree begin anew.
		w.say("a", 90*time.Hour)
		w.say("b", 90*time.Hour)
		time.Sleep(2 * stepOut)
		w.say("b")
		w.say("a", 100*time.Hour)
		time.Sleep(2 * stepOut)
		synctest.Wait()
		if off := n.clock.error().Round(time.Minute); off != 100*time.Hour {
			t.Errorf("off by %s\n%s", off, n.log)
		}
		n.stop()
	})
}

// A time is saved each hour and at the stop. A wrong one heals: it isn't kept on while
// servers contradict it, and when it is over, they are believed.
func TestAWrongFloorHeals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{lies: map[string][]time.Duration{"a": {3 * time.Hour}}}
		n := oldNode(t, w, time.Hour, 0, "a")
		time.Sleep(2*time.Hour + time.Minute)
		synctest.Wait()
		if got := n.saved(); got != 3*time.Hour-time.Minute {
			t.Errorf("after two hours, what is saved is off by %s", got)
		}
		w.say("a", 0)
		time.Sleep(2 * stepOut)
		synctest.Wait()
		if s := n.status(); n.clock.error() != 3*time.Hour || s.Reason != Impossible || s.Synced {
			t.Errorf("off by %s, %+v", n.clock.error(), s)
		}
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		if s := n.status(); n.clock.error() != 0 || !s.Synced {
			t.Errorf("off by %s, %+v\n%s", n.clock.error(), s, n.log)
		}
		time.Sleep(10 * time.Minute)
		n.stop()
		if got := n.saved(); got != 0 {
			t.Errorf("at the stop, what is saved is off by %s", got)
		}
	})
}

// The same on a machine whose hardware clock has no battery.
func TestAWrongFloorHealsWithoutABattery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{lies: map[string][]time.Duration{"a": {0}}}
		n := oldNode(t, w, -3*time.Hour, -year/2, "a")
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if s := n.status(); !n.up() || n.clock.error() != 3*time.Hour || s.Reason != Impossible {
			t.Errorf("off by %s, %+v", n.clock.error(), s)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if s := n.status(); n.clock.error() != 0 || !s.Synced {
			t.Errorf("off by %s, %+v\n%s", n.clock.error(), s, n.log)
		}
		n.stop()
	})
}

// The operator's order moves the clock as far as it says. Answers to questions from before
// don't count, and servers put the rest right.
func TestTheOperatorSetsTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{lies: map[string][]time.Duration{"a": {0}}}
		n := oldNode(t, w, 20*day, -10*day, "a")
		time.Sleep(time.Minute)
		synctest.Wait()
		if off := n.clock.error(); off != -10*day {
			t.Fatalf("off by %s", off)
		}
		set := func(off time.Duration) {
			t.Helper()
			if err := n.daemon.Set(t.Context(), time.Now().Round(0).Add(off)); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		}
		set(-time.Minute)
		time.Sleep(time.Second)
		synctest.Wait()
		if s := n.status(); n.clock.error() != 0 || !s.Synced || s.Server != "a-0" {
			t.Errorf("off by %s, %+v", n.clock.error(), s)
		}
		w.say("a") // silent
		set(-19 * day)
		if off, saved := n.clock.error(), n.saved(); off != -19*day || saved != -19*day-saveEvery {
			t.Errorf("off by %s, and what is saved by %s", off, saved)
		}
		time.Sleep(2*saveEvery + time.Minute)
		synctest.Wait()
		if saved := n.saved(); saved < -19*day-saveEvery {
			t.Errorf("without servers, what is saved is off by %s", saved)
		}
		set(time.Minute) // a watch that is fast
		w.say("a", 0)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if off := n.clock.error(); off != 0 {
			t.Errorf("off by %s", off)
		}
		if err := n.daemon.Set(t.Context(), beforeSynctest.Add(-time.Second)); err == nil || !strings.Contains(err.Error(), "this system was built then") {
			t.Errorf("before it was built: %v", err)
		}
		n.stop()
		if err := n.daemon.Set(t.Context(), time.Now()); err == nil || !strings.Contains(err.Error(), `"timed" doesn't answer`) {
			t.Errorf("after the stop: %v", err)
		}
	})
}

// What was asked before the clock was set is of another clock.
func TestAnAnswerThatIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeClock{off: -20 * time.Hour}
		o := of(c, truth)
		quick := o.query
		o.query = func(ctx context.Context, addr string) (sample, error) {
			got, err := quick(ctx, addr)
			time.Sleep(time.Second)
			return got, err
		}
		n := startNode(t, o, config.Time{Servers: []string{"a"}})
		synctest.Wait()
		if err := n.daemon.Set(t.Context(), time.Now().Round(0)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if c.error() != 0 || c.jumps() != 1 || !n.status().Synced {
			t.Errorf("off by %s, set %d times, %+v", c.error(), c.jumps(), n.status())
		}
		n.stop()
	})
}

// Nobody sets the clock to when no certificate of the cluster is valid.
func TestAfterTheAuthorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made, err := pki.NewEtcdCA(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		w := &world{lies: map[string][]time.Duration{"a": {50 * year}, "b": {50 * year}}}
		n := startMember(t, w.of(&fakeClock{}), config.Time{Servers: []string{"a", "b"}}, config.CertKey{Crt: made.Cert, Key: made.Key})
		time.Sleep(time.Minute)
		synctest.Wait()
		if off := n.clock.error(); off != 0 || !strings.Contains(n.status().Message, "authorities are valid until") {
			t.Errorf("off by %s, %+v", off, n.status())
		}
		if err := n.daemon.Set(t.Context(), time.Now().Add(50*year)); err == nil || !strings.Contains(err.Error(), "authorities are valid until") {
			t.Errorf("the operator: %v", err)
		}
		n.stop()
	})
}

func TestContainersHaveTheHostsClock(t *testing.T) {
	d := New(Options{Mode: boot.Container, kernel: &fakeClock{}})
	if err := d.Set(t.Context(), time.Now()); err == nil || !strings.Contains(err.Error(), "the host's") {
		t.Errorf("got %v", err)
	}
}

// Times with a monotonic part are compared by that, and it knows no steps.
func TestMachineClockIsTheWallClock(t *testing.T) {
	if now := (machineClock{}).Now(); now != now.Round(0) {
		t.Errorf("%s has a monotonic part", now)
	}
}

func TestFloorOfTheStore(t *testing.T) {
	store, want := resource.NewStore(), time.Unix(1_800_000_000, 0)
	if err := Statuses.Put(store.As("test"), StatusID, Status{Floor: want}); err != nil {
		t.Fatal(err)
	}
	if got := Floor(store); !got.Equal(want) {
		t.Errorf("got %s", got)
	}
}

// overNetwork asks servers on the network, about a clock that isn't the kernel's.
func overNetwork(c *fakeClock) Options {
	return Options{kernel: c, resolve: resolve, query: func(ctx context.Context, addr string) (sample, error) { return query(ctx, addr, c.Now) }}
}

// The same with servers on the network: one liar, and then another one that agrees.
func TestServersOnTheNetwork(t *testing.T) {
	if lo, err := netlink.LinkByName("lo"); err == nil && os.Geteuid() == 0 {
		_ = netlink.LinkSetUp(lo) // of this namespace
	}
	one, err := timeserver.Serve(t, "127.0.0.1:0", -3*day)
	if err != nil {
		t.Fatal(err)
	}
	two, err := timeserver.Serve(t, "127.0.0.1:0", -3*day)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "clock")
	if err := os.WriteFile(file, []byte(stamp(time.Now().Add(-20*day))+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &fakeClock{}
	o := overNetwork(c)
	o.file = file
	n := startNode(t, o, config.Time{Servers: []string{one}})
	eventually.That(t, 15*time.Second, "one server to be heard, and not believed", func() error {
		if s, err := Statuses.Get(n.store, StatusID); err != nil || s.Spec.Reason != Unconfirmed {
			return fmt.Errorf("%+v, %v", s.Spec, err)
		}
		return nil
	})
	if c.jumps() != 0 {
		t.Errorf("one server has set the clock")
	}
	n.configure(config.Time{Servers: []string{one, two}})
	eventually.That(t, 15*time.Second, "two servers that agree to be believed", func() error {
		if s := n.status(); !s.Synced || c.jumps() != 1 || (c.error()+3*day).Abs() > time.Second {
			return fmt.Errorf("off by %s, %+v\n%s", c.error(), s, n.log)
		}
		return nil
	})
}
