package sysctl

import (
	"bytes"
	"context"
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
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/google/go-cmp/cmp"
)

type logBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *logBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *logBuffer) count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.b.String(), text)
}

// bench is the controller over a kernel made of files.
type bench struct {
	t      *testing.T
	store  *resource.Store
	dir    string
	logged logBuffer
}

// A setting below /sys that is one of several values is given back as the one that was chosen. In a container, all are
// the host's.
func TestSysfs(t *testing.T) {
	const scheduler = "block/sda/queue/scheduler"
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, store: resource.NewStore(), dir: t.TempDir()}
		b.kernel(scheduler, "none [mq-deadline] kyber")
		files := sysfs
		files.root = b.dir
		b.start(files.controller(boot.Machine))
		configure := func(settings map[string]string) {
			c := &config.Config{Machine: config.Machine{Sysfs: settings}}
			if err := configuration.Configs.Put(b.store.As("test"), configuration.ConfigID, c); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		configure(map[string]string{scheduler: "none"})
		b.is(scheduler, "none")
		if got, err := SysfsStatuses.Get(b.store, scheduler); err != nil || got.Spec != (Status{Value: "none", Default: "mq-deadline"}) {
			t.Errorf("%+v, %v", got.Spec, err)
		}
		configure(nil)
		b.is(scheduler, "mq-deadline")
	})
	for text, want := range map[string]string{"[a] b": "a", "a [b]": "b", "a [b] c": "b", "a b": "", "[a b]": "", "[1] x [2]": ""} {
		got := ""
		if m := choice.FindStringSubmatch(text); m != nil {
			got = m[1]
		}
		if got != want {
			t.Errorf("%s: the choice is %q, want %q", text, got, want)
		}
	}
}

func newBench(t *testing.T, mode boot.Mode, parameters map[string]string) *bench {
	t.Helper()
	b := &bench{t: t, store: resource.NewStore(), dir: t.TempDir()}
	for path, value := range parameters {
		b.kernel(path, value)
	}
	b.run(mode)
	return b
}

// run runs the controller of kernel parameters until the test ends.
func (b *bench) run(mode boot.Mode) {
	b.t.Helper()
	files := procSys
	files.root = b.dir
	b.start(files.controller(mode))
}

func (b *bench) start(c resource.Controller) {
	t := b.t
	t.Helper()
	rt, err := resource.NewRuntime(b.store, slog.New(slog.NewTextHandler(&b.logged, nil)), c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- rt.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
}

func (b *bench) kernel(path, value string) {
	b.t.Helper()
	file := filepath.Join(b.dir, path)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) configure(sysctls map[string]string) {
	b.t.Helper()
	c := &config.Config{Machine: config.Machine{Sysctls: sysctls}}
	if err := configuration.Configs.Put(b.store.As("test"), configuration.ConfigID, c); err != nil {
		b.t.Fatal(err)
	}
	synctest.Wait()
}

func (b *bench) is(path, want string) {
	b.t.Helper()
	got, err := os.ReadFile(filepath.Join(b.dir, path))
	if err != nil || strings.TrimSpace(string(got)) != want {
		b.t.Errorf("%s is %q (%v), want %q", path, got, err, want)
	}
}

func (b *bench) statuses(want map[string]Status) {
	b.t.Helper()
	got := map[string]Status{}
	for _, o := range Statuses.List(b.store) {
		got[o.ID] = o.Spec
	}
	if d := cmp.Diff(want, got); d != "" {
		b.t.Errorf("statuses: %s", d)
	}
}

func TestParametersFollowTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, boot.Machine, map[string]string{"vm/max_map_count": "262144", "vm/swappiness": "60", "net/ipv4/tcp_rmem": "4096\t131072\t6291456"})
		b.statuses(map[string]Status{})
		b.configure(map[string]string{"vm.max_map_count": "524288", "vm.swappiness": "10", "net.ipv4.tcp_rmem": "4096 131072 6291456"})
		b.is("vm/max_map_count", "524288")
		b.is("net/ipv4/tcp_rmem", "4096\t131072\t6291456") // the same, and left alone
		b.configure(map[string]string{"vm.max_map_count": "600000"})
		b.is("vm/max_map_count", "600000")
		b.is("vm/swappiness", "60")
		b.statuses(map[string]Status{"vm.max_map_count": {Value: "600000", Default: "262144"}})
		b.configure(nil)
		b.is("vm/max_map_count", "262144")
		b.statuses(map[string]Status{})
		b.configure(map[string]string{"vm.swappiness": "20"})
		b.statuses(map[string]Status{"vm.swappiness": {Value: "20", Default: "60"}})
	})
}

// What a kernel lacks is told once, and set when a module brings it.
func TestMissingParameterComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, boot.Machine, nil)
		wanted := map[string]string{"net.netfilter.nf_conntrack_max": "262144"}
		b.configure(wanted)
		time.Sleep(10 * time.Minute) // virtual
		synctest.Wait()
		if n := b.logged.count("level=WARN"); n != 1 || b.logged.count("net.netfilter.nf_conntrack_max: there is no such parameter") != 1 {
			t.Errorf("%d warnings: %s", n, &b.logged.b)
		}
		b.kernel("net/netfilter/nf_conntrack_max", "65536")
		time.Sleep(checkEvery)
		synctest.Wait()
		b.is("net/netfilter/nf_conntrack_max", "262144")
		b.statuses(map[string]Status{"net.netfilter.nf_conntrack_max": {Value: "262144", Default: "65536"}})
	})
}

// A program that sets a parameter otherwise, as the kubelet does at its start,
// doesn't win; what was there before us is still known.
func TestChangeByAnotherProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, boot.Machine, map[string]string{"kernel/panic": "10"})
		b.configure(map[string]string{"kernel.panic": "60"})
		b.kernel("kernel/panic", "10")
		time.Sleep(checkEvery)
		synctest.Wait()
		b.is("kernel/panic", "60")
		if b.logged.count("changed to \\\"10\\\" by another program") != 1 {
			t.Errorf("logged %s", &b.logged.b)
		}
		b.configure(nil)
		b.is("kernel/panic", "10")
	})
}

// The kernel of a container node is its host's.
func TestContainerSetsOnlyItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, boot.Container, map[string]string{"vm/swappiness": "60", "net/core/somaxconn": "4096", "kernel/shmmax": "1"})
		b.configure(map[string]string{"vm.swappiness": "10", "net.core.somaxconn": "512", "kernel.shmmax": "2"})
		b.is("vm/swappiness", "60")
		b.is("net/core/somaxconn", "512")
		b.is("kernel/shmmax", "2")
		if b.logged.count("vm.swappiness: belongs to the host") != 1 {
			t.Errorf("logged %s", &b.logged.b)
		}
	})
}

func TestNamesStayBelowTheRoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, boot.Machine, map[string]string{"vm/swappiness": "60"})
		outside := filepath.Join(filepath.Dir(b.dir), "outside")
		if err := os.WriteFile(outside, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		b.configure(map[string]string{"../outside": "1", "/etc/passwd": "1", "": "1", "vm.swappiness": "5", "vm/swappiness": "6"})
		b.is("../outside", "")
		b.is("vm/swappiness", "6")
		if o, err := Statuses.Get(b.store, "vm.swappiness"); err != nil || o.Spec.Problem != "is the same parameter as vm/swappiness" {
			t.Errorf("%+v, %v", o.Spec, err)
		}
	})
}

func TestPath(t *testing.T) {
	for name, want := range map[string]string{
		"vm.max_map_count":                   "vm/max_map_count",
		"net.ipv4.conf.eth0/7.forwarding":    "net/ipv4/conf/eth0.7/forwarding",
		"net/ipv4/conf/eth0.7/forwarding":    "net/ipv4/conf/eth0.7/forwarding",
		"kernel.core_pattern":                "kernel/core_pattern",
		"net.bridge.bridge-nf-call-iptables": "net/bridge/bridge-nf-call-iptables",
	} {
		if got := config.SysctlPath(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}
