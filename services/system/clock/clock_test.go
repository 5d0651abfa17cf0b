package clock

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
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
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	nodenet "github.com/garboard-os/garboard/services/system/network"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fakeClock has an offset. It never changes the machine's clock.
type fakeClock struct {
	mu    sync.Mutex // guards all following fields
	off   time.Duration
	sets  []time.Time
	slews []time.Duration
	last  unix.Timex
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Round(0).Add(c.off)
}

func (c *fakeClock) Set(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = t.Sub(time.Now().Round(0))
	c.sets = append(c.sets, t)
	return nil
}

// Adjust corrects at once what the kernel would correct within a minute.
func (c *fakeClock) Adjust(tx *unix.Timex) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += time.Duration(tx.Offset)
	c.slews = append(c.slews, time.Duration(tx.Offset))
	c.last = *tx
	return nil
}

func (c *fakeClock) error() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.off
}

func (c *fakeClock) disturb(off time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = off
}

func (c *fakeClock) adjusted() unix.Timex {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

func (c *fakeClock) jumps() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sets)
}

// fake is a network of servers. Each of them has an address with its name.
type fake func(server string) (lie time.Duration, err error)

func (f fake) resolve(_ context.Context, server string) ([]string, error) {
	return []string{server}, nil
}

func truth(string) (time.Duration, error) { return 0, nil }

func silence(string) (time.Duration, error) { return 0, errors.New("i/o timeout") }

// answer is the one of a server whose time is wrong by that.
func answer(now time.Time, lie time.Duration) sample {
	return sample{stratum: 2, offset: time.Now().Round(0).Sub(now) + lie, distance: 5 * time.Millisecond}
}

// of has the node ask f. Only tests of what depends on the network have something else.
func of(c *fakeClock, f fake) Options {
	return Options{kernel: c, resolve: f.resolve, query: func(_ context.Context, addr string) (sample, error) {
		now := c.Now()
		lie, err := f(addr)
		return answer(now, lie), err
	}}
}

type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// node is timed with its inputs.
type node struct {
	t      *testing.T
	clock  *fakeClock
	store  *resource.Store
	graph  *dag.Graph
	log    *syncBuffer
	daemon *Daemon
	file   string
	ca     config.CertKey
	stop   func()
}

// beforeSynctest is a build time for tests that don't depend on it: in a bubble
// of testing/synctest, time begins with the year 2000.
var beforeSynctest = time.Date(1999, time.January, 1, 0, 0, 0, 0, time.UTC)

func startNode(t *testing.T, o Options, cfg config.Time) *node {
	t.Helper()
	return startMember(t, o, cfg, config.CertKey{})
}

// startMember is a node whose cluster has this authority.
func startMember(t *testing.T, o Options, cfg config.Time, ca config.CertKey) *node {
	t.Helper()
	n := &node{t: t, store: resource.NewStore(), log: &syncBuffer{}, ca: ca}
	n.clock, _ = o.kernel.(*fakeClock)
	o.Store = n.store
	if o.built.IsZero() {
		o.built = beforeSynctest
	}
	if o.file == "" {
		o.file = filepath.Join(t.TempDir(), "clock")
	}
	n.file = o.file
	n.configure(cfg)
	var err error
	log := slog.New(slog.NewTextHandler(n.log, nil))
	n.daemon = New(o)
	n.graph, err = dag.New(dag.Options{Log: func(string) *slog.Logger { return log }}, n.daemon.Service())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.graph.Run(ctx) })
	n.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(n.stop)
	return n
}

func (n *node) configure(t config.Time) {
	n.t.Helper()
	c := &config.Config{Machine: config.Machine{Time: t}, Cluster: config.Cluster{Etcd: config.Etcd{CA: n.ca}}}
	c.FillDefaults()
	if err := configuration.Configs.Put(n.store.As("test"), configuration.ConfigID, c); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) status() Status {
	n.t.Helper()
	o, err := Statuses.Get(n.store, StatusID)
	if err != nil {
		n.t.Fatal(err)
	}
	return o.Spec
}

func (n *node) up() bool {
	s, _ := n.graph.Status(ID)
	return s.Up
}

// The clock is set once, then slewed, and the interval of queries becomes longer.
func TestStepThenSlew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeClock{off: -72 * time.Hour}
		n := startNode(t, of(c, truth), config.Time{Servers: []string{"a"}})
		synctest.Wait()
		if !n.up() || c.jumps() != 1 || c.error() != 0 {
			t.Fatalf("up %v, set %d times, off by %s\n%s", n.up(), c.jumps(), c.error(), n.log)
		}
		c.disturb(40 * time.Millisecond)
		time.Sleep(65 * time.Second) // virtual
		synctest.Wait()
		if c.jumps() != 1 || c.error() != 0 {
			t.Errorf("set %d times, off by %s; want it pulled", c.jumps(), c.error())
		}
		// Nanoseconds, the kernel's loop on, "unsynchronised" off.
		if tx := c.adjusted(); tx.Modes&(adjOffset|adjNano) != adjOffset|adjNano || tx.Offset != -40_000_000 || tx.Status != staPLL || tx.Constant != minPoll-4 || tx.Maxerror != 5000 {
			t.Errorf("adjtimex got %+v", tx)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if s := n.status(); !s.Synced || s.Source != SourceNTP || s.Server != "a" || s.Poll != 1024*time.Second {
			t.Errorf("status is %+v", s)
		}
		n.stop()
	})
}

// A clock that was right is set only if it stays wrong.
func TestSpikeIsNotFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeClock{}
		var mu sync.Mutex
		spike := time.Duration(0)
		ask := func(server string) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			return spike, nil
		}
		set := func(d time.Duration) { mu.Lock(); defer mu.Unlock(); spike = d }
		n := startNode(t, of(c, ask), config.Time{Servers: []string{"a"}})
		synctest.Wait()
		set(3 * time.Second)
		time.Sleep(200 * time.Second)
		set(0)
		time.Sleep(200 * time.Second)
		synctest.Wait()
		if c.jumps() != 0 {
			t.Errorf("the clock followed a spike\n%s", n.log)
		}
		set(3 * time.Second)
		time.Sleep(stepOut + 200*time.Second)
		synctest.Wait()
		if c.jumps() == 0 {
			t.Errorf("the clock didn't follow a lasting change\n%s", n.log)
		}
		n.stop()
	})
}

// Without a time server, the boot continues after the limited wait, and logs it.
func TestNoTimeServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeClock{}
		n := startNode(t, of(c, silence), config.Time{Servers: []string{"10.0.0.9"}, BootTimeout: 20 * time.Second})
		time.Sleep(19 * time.Second)
		synctest.Wait()
		if n.up() {
			t.Fatal("up before the time was over")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !n.up() {
			t.Fatal("not up after the time was over")
		}
		want := "time isn't synchronised after 20s (10.0.0.9: i/o timeout); going on with the clock at"
		if !strings.Contains(n.log.String(), want) {
			t.Errorf("the log is\n%s\nwant in it: %s", n.log, want)
		}
		if s := n.status(); s.Synced || s.Message != "10.0.0.9: i/o timeout" {
			t.Errorf("status is %+v", s)
		}
		n.stop()
	})
}

func TestFloor(t *testing.T) {
	at := func(s string) time.Time {
		when, err := time.Parse(time.RFC3339, s)
		if err != nil {
			t.Fatal(err)
		}
		return when
	}
	for name, c := range map[string]struct {
		now, built, saved, made, want string
		fresh                         bool // no time was saved that can be used
	}{
		"dead battery":       {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "", "", "2026-01-01T00:00:00Z", true},
		"saved is later":     {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "2026-03-05T07:00:00Z", "", "2026-03-05T07:00:00Z", false},
		"clock is later":     {"2026-05-01T00:00:00Z", "2026-01-01T00:00:00Z", "2026-03-05T07:00:00Z", "", "2026-05-01T00:00:00Z", false},
		"saved is nonsense":  {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "later", "", "2026-01-01T00:00:00Z", true},
		"an older was saved": {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", "", "2026-01-01T00:00:00Z", false},
		// An authority is valid from a day before it was made.
		"a new cluster":                         {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "", "2026-07-02T00:00:00Z", "2026-07-01T00:00:00Z", true},
		"a wrong clock was saved":               {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z", "2026-07-02T00:00:00Z", "2026-07-01T00:00:00Z", true},
		"the clock is beyond the cluster's end": {"2099-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "2026-07-03T00:00:00Z", "2026-07-02T00:00:00Z", "2026-07-03T00:00:00Z", false},
		"an older cluster":                      {"1970-01-01T00:00:07Z", "2026-01-01T00:00:00Z", "", "2025-07-02T00:00:00Z", "2026-01-01T00:00:00Z", true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "clock")
				var ca config.CertKey
				if c.made != "" {
					made, err := pki.NewEtcdCA(at(c.made))
					if err != nil {
						t.Fatal(err)
					}
					ca = config.CertKey{Crt: made.Cert, Key: made.Key}
				}
				if c.saved != "" {
					if err := os.WriteFile(file, []byte(c.saved+"\n"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				clock := &fakeClock{off: time.Until(at(c.now))}
				o := of(clock, silence)
				o.built, o.file = at(c.built), file
				n := startMember(t, o, config.Time{}, ca)
				synctest.Wait()
				if got := stamp(clock.Now()); got != c.want {
					t.Errorf("the clock is at %s, want %s", got, c.want)
				}
				n.stop()
				data, err := os.ReadFile(file)
				saved := strings.TrimSpace(string(data))
				if c.fresh || c.now == c.want { // the hardware clock goes on, and may be wrong
					if saved != c.saved {
						t.Errorf("saved at stop: %q", saved)
					}
				} else if err != nil || at(saved).Before(at(c.want)) {
					t.Errorf("saved at stop: %q, %v", data, err)
				}
			})
		})
	}
}

func TestContainerLeavesTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeClock{off: -time.Hour}
		o := of(c, truth)
		o.Mode, o.built = boot.Container, time.Now()
		n := startNode(t, o, config.Time{Servers: []string{"a"}})
		time.Sleep(time.Hour)
		synctest.Wait()
		if !n.up() || c.jumps() > 0 || len(c.slews) > 0 {
			t.Errorf("up %v, set %d times, pulled %d times", n.up(), c.jumps(), len(c.slews))
		}
		if s := n.status(); !cmp.Equal(s, Status{Synced: true, Source: SourceHost}) {
			t.Errorf("status is %+v", s)
		}
		n.stop()
	})
}

// S-063: the servers are the configured ones, else DHCP's; a change takes effect at once.
func TestS063Servers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		asked := ""
		ask := func(server string) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			asked = server
			return truth(server)
		}
		n := startNode(t, of(&fakeClock{}, ask), config.Time{})
		expect := func(want string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if asked != want {
				t.Errorf("asked %s, want %s", asked, want)
			}
		}
		expect(publicPool)
		offer := nodenet.TimeServers
		if err := offer.Put(n.store.As("networkd"), nodenet.TimeServersID, addrs("192.0.2.7")); err != nil {
			t.Fatal(err)
		}
		expect("192.0.2.7")
		n.configure(config.Time{Servers: []string{"time.example.org"}})
		expect("time.example.org")
		n.stop()
	})
}

// Servers that are changed on a running node are asked at once and, if they are
// wrong, often. That is logged once, and ends with the old servers.
func TestS063WrongServersAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		count := map[string]int{}
		ask := func(server string) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			if count[server]++; server == "wrong" {
				return silence(server)
			}
			return truth(server)
		}
		asked := func(server string) int {
			mu.Lock()
			defer mu.Unlock()
			return count[server]
		}
		n := startNode(t, of(&fakeClock{}, ask), config.Time{Servers: []string{"right"}})
		synctest.Wait()
		n.configure(config.Time{Servers: []string{"wrong"}})
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if asked("wrong") < 4 || strings.Count(n.log.String(), "the new time servers bring no time") != 1 || !n.status().Synced {
			t.Errorf("asked %d times, synced %v, log: %s", asked("wrong"), n.status().Synced, n.log)
		}
		before := asked("right")
		n.configure(config.Time{Servers: []string{"right"}})
		synctest.Wait()
		if asked("right") != before+1 || n.status().Server != "right" {
			t.Errorf("the old server was asked %d times more; %+v", asked("right")-before, n.status())
		}
		n.configure(config.Time{Servers: []string{"right"}, Disabled: true})
		synctest.Wait()
		if s := n.status(); s.Synced || s.Message != "machine.time.disabled is set" {
			t.Errorf("disabled: %+v", s)
		}
		n.configure(config.Time{Servers: []string{"right"}})
		synctest.Wait()
		if !n.status().Synced {
			t.Errorf("enabled again: %+v", n.status())
		}
		n.stop()
	})
}

// A server may send anything: after a panic the answer is lost, but the machine
// continues.
func TestPanicIsSurvived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ask := func(server string) (time.Duration, error) {
			if server == "strange" {
				panic("an answer that nobody thought of")
			}
			return truth(server)
		}
		n := startNode(t, of(&fakeClock{}, ask), config.Time{Servers: []string{"strange", "kind"}})
		time.Sleep(time.Hour) // virtual
		synctest.Wait()
		if !n.status().Synced {
			t.Errorf("status %+v", n.status())
		}
		n.stop()
	})
}
