package network

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
)

// leasing is networkd's loop in virtual time, with one link, test0, and two sources of leases for
// it: DHCP, and one of IPv6 that only this test has.
type leasing struct {
	*owner
	t      *testing.T
	v4, v6 *script
	log    *syncBuffer
	mu     sync.Mutex // guards kernel
	kernel map[object]bool
}

func startLeasing(t *testing.T, v4, v6 func(what string) (*lease, error)) *leasing {
	t.Helper()
	n := &leasing{
		t: t, log: &syncBuffer{}, kernel: map[object]bool{},
		v4: &script{start: time.Now(), answer: v4}, v6: &script{start: time.Now(), answer: v6},
	}
	open := func(p protocol) func(config.Link, func() string) protocol {
		return func(config.Link, func() string) protocol { return p }
	}
	both, dir := slices.Clone(sources[:1]), t.TempDir()
	both[0].open = open(n.v4)
	both = append(both, source{name: "DHCPv6", bits: 128, wanted: both[0].wanted, open: open(n.v6)})
	host, err := os.Hostname() // so that it isn't set
	if err != nil {
		t.Fatal(err)
	}
	cfg := &config.Config{Machine: config.Machine{Network: config.Network{
		Hostname: host, Interfaces: []config.Interface{{Name: "test0", DHCP: true}},
	}}}
	test0 := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "test0", Index: 2, Flags: net.FlagUp}}
	n.owner = &owner{
		Daemon: New(Options{
			Store: resource.NewStore(), sources: both, pinFile: filepath.Join(dir, "pin"), etcDir: dir,
			list: func() ([]netlink.Link, error) { return []netlink.Link{test0}, nil },
			read: func() (actual, error) {
				n.mu.Lock()
				defer n.mu.Unlock()
				return actual{objects: maps.Clone(n.kernel)}, nil
			},
			change: func(o object, add bool) error {
				n.mu.Lock()
				defer n.mu.Unlock()
				if _, is := o.(mtu); is { // a link has one
					maps.DeleteFunc(n.kernel, func(old object, _ bool) bool { _, is := old.(mtu); return is })
				}
				if delete(n.kernel, o); add {
					n.kernel[o] = true
				}
				return nil
			},
			pinReady: func() bool { return false },
		}),
		log: slog.New(slog.NewTextHandler(n.log, nil)), cfg: cfg, attempts: map[object]*attempt{},
		clients: map[leaseKey]*client{}, heard: make(chan func() bool), errs: map[string]error{},
		settled: true,
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.reconcile(ctx)
	done := make(chan error)
	go func() {
		defer n.stopClients()
		defer cancel()
		done <- n.loop(ctx, nil)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

// after lets the time pass. Then it compares addresses, routes and MTU of the
// link, and the published name servers, time servers and addresses.
func (n *leasing) after(d time.Duration, want ...string) {
	n.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	var got []string
	add := func(what string, is any) { got = append(got, fmt.Sprintf("%s %v", what, is)) }
	addresses, routes, size := []string{}, []string{}, 0
	n.mu.Lock()
	for o := range n.kernel {
		switch o := o.(type) {
		case address:
			addresses = append(addresses, o.prefix.String())
		case route:
			routes = append(routes, o.String())
		case mtu:
			size = o.bytes
		}
	}
	n.mu.Unlock()
	slices.Sort(addresses)
	slices.Sort(routes)
	add("addresses", addresses)
	add("routes", routes)
	add("MTU", size)
	resolvers, err := Resolvers.Get(n.o.Store, ResolversID)
	if err != nil {
		n.t.Fatal(err)
	}
	add("resolvers", resolvers.Spec)
	times, err := TimeServers.Get(n.o.Store, TimeServersID)
	if err != nil {
		n.t.Fatal(err)
	}
	add("time servers", times.Spec)
	node, err := Addresses.Get(n.o.Store, AddressID)
	if err != nil {
		n.t.Fatal(err)
	}
	add("node", node.Spec.All)
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("after %s: %s", time.Since(n.v4.start), diff)
	}
}

// A link gets the settings of all its leases, of each family; if they differ,
// the first source has priority. The end of a lease removes only its own
// settings, and so does the end of an address before its lease ends.
func TestLeasesOfTwoSourcesOnOneLink(t *testing.T) {
	const four, six, brief = "10.0.0.5/24", "2001:db8::5/64", "2001:db8::6/64"
	fromFour := func(string) (*lease, error) {
		l := granted(t, 1000)
		l.mtu, l.Resolvers, l.ntp = 1400, []netip.Addr{addr("10.0.0.53")}, []netip.Addr{addr("10.0.0.1")}
		l.routes = []route{{network: prefix("0.0.0.0/0"), gateway: addr("10.0.0.1")}}
		return l, nil
	}
	fromSix := func(string) (*lease, error) {
		at := func(s int) time.Time { return time.Now().Add(time.Duration(s) * time.Second) }
		return &lease{
			addresses:   []leasedAddress{{prefix(six), at(300)}, {prefix(brief), at(100)}},
			LeaseStatus: LeaseStatus{Server: "fe80::1", Expires: at(300), Resolvers: []netip.Addr{addr("10.0.0.53"), addr("2001:db8::53")}},
			renewAt:     at(150), rebindAt: at(240),
			mtu: 1300, routes: []route{{network: prefix("::/0"), gateway: addr("fe80::1")}},
		}, nil
	}
	silent := func(string) (*lease, error) { return nil, errNoAnswer }
	all := []string{
		"addresses [10.0.0.5/24 2001:db8::5/64 2001:db8::6/64]",
		"routes [0.0.0.0/0 via 10.0.0.1 metric 1024 ::/0 via fe80::1 metric 1024]", "MTU 1400",
		"resolvers [10.0.0.53 2001:db8::53]", "time servers [10.0.0.1]",
		"node [10.0.0.5/24 2001:db8::5/64 2001:db8::6/64]",
	}
	synctest.Test(t, func(t *testing.T) {
		n := startLeasing(t, fromFour, fromSix)
		n.after(time.Second, all...)
		n.v6.set(silent)
		n.after(100*time.Second, // the second address of IPv6 has ended, its lease hasn't
			"addresses [10.0.0.5/24 2001:db8::5/64]", all[1], all[2], all[3], all[4], "node [10.0.0.5/24 2001:db8::5/64]")
		n.after(200*time.Second, // that of IPv6 has expired
			"addresses [10.0.0.5/24]", "routes [0.0.0.0/0 via 10.0.0.1 metric 1024]", "MTU 1400",
			"resolvers [10.0.0.53]", "time servers [10.0.0.1]", "node [10.0.0.5/24]")
		if diff := cmp.Diff([]string{"acquire@0"}, n.v4.questions()); diff != "" {
			t.Errorf("that of IPv4 was asked for: %s", diff)
		}
		n.v6.set(fromSix)
		n.v4.set(func(what string) (*lease, error) {
			if what == "renew" {
				return nil, errRefused
			}
			return nil, errNoAnswer
		})
		n.after(201*time.Second, // DHCP has refused at T1, after 500 s
			"addresses [2001:db8::5/64 2001:db8::6/64]", "routes [::/0 via fe80::1 metric 1024]", "MTU 1300",
			"resolvers [10.0.0.53 2001:db8::53]", "time servers []", "node [2001:db8::5/64 2001:db8::6/64]")
		for _, line := range []string{
			"DHCP lease on test0: " + four + " from 10.0.0.1", "DHCPv6 lease on test0: " + six + ", " + brief + " from fe80::1",
			"lost the DHCPv6 lease of " + six + ", " + brief + " on test0: it expired unanswered",
			"lost the DHCP lease of " + four + " on test0: the server refused",
			"the node's address changes from 10.0.0.5 to 2001:db8::5",
		} {
			if !strings.Contains(n.log.String(), line) {
				t.Errorf("the log doesn't say %q:\n%s", line, n.log)
			}
		}
	})
}

// The node waits for each source of a link by its name.
func TestEachSourceIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := startLeasing(t,
			func(string) (*lease, error) { return granted(t, 1000), nil },
			func(string) (*lease, error) { return nil, errNoAnswer })
		time.Sleep(warnAfter + 10*time.Second)
		synctest.Wait()
		status, err := Statuses.Get(n.o.Store, ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{`waiting for DHCPv6 answer on "test0"`}, status.Spec.Problems); diff != "" {
			t.Error(diff)
		}
		if line := "no DHCPv6 answer on test0 for"; !strings.Contains(n.log.String(), line) {
			t.Errorf("the log doesn't say %q:\n%s", line, n.log)
		}
	})
}

// Name servers and domains of router advertisements are a lease of their link: link-local servers are on it, and what
// can't be is told.
func TestAdvertisedServers(t *testing.T) {
	t.Parallel()
	o := &owner{
		cfg: &config.Config{}, Daemon: New(Options{physical: func(netlink.Link) bool { return true }}),
		links: map[string]netlink.Link{"test0": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "test0", Index: 2}}},
	}
	now := time.Now()
	servers := &ndp.RecursiveDNSServer{Lifetime: time.Hour, Servers: []netip.Addr{addr("fe80::1"), addr("::"), addr("2001:db8::53"), addr("ff02::1")}}
	domains := &ndp.DNSSearchList{Lifetime: time.Hour, DomainNames: []string{"corp.example.org", "bad_name"}}
	if !o.advertise(2, []ndp.Option{servers, domains}, now) || o.advertise(2, []ndp.Option{servers, domains}, now) {
		t.Error("only the first advertisement changes anything")
	}
	if diff := cmp.Diff([]string{"fe80::1%test0", "2001:db8::53"}, strings.Split(config.Joined(advertisedServers(o), " "), " ")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"corp.example.org"}, advertisedDomains(o)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{
		"RA lease on test0: the name server :: can't be used, and is left out",
		"RA lease on test0: the name server ff02::1 can't be used, and is left out",
		`RA lease on test0: the domain "bad_name" can't be used, and is left out`,
	}, o.problems()); diff != "" {
		t.Error(diff)
	}
	servers.Lifetime, domains.Lifetime = 0, 0
	if !o.advertise(2, []ndp.Option{servers, domains}, now) || len(advertisedServers(o))+len(advertisedDomains(o))+len(o.problems()) > 0 {
		t.Errorf("after the end: %v %v %v", advertisedServers(o), advertisedDomains(o), o.problems())
	}
}

func advertisedServers(o *owner) []netip.Addr {
	all, _ := found(o, "", nil, func(l *lease) []netip.Addr { return l.Resolvers })
	return all
}

func advertisedDomains(o *owner) []string {
	all, _ := found(o, "", nil, func(l *lease) []string { return l.Search })
	return all
}

// Name servers, search domains and time servers say who wants them.
func TestServersHaveOrigins(t *testing.T) {
	t.Parallel()
	mine := config.Network{Nameservers: []netip.Addr{addr("10.9.0.1"), addr("10.9.0.2")}, SearchDomains: []string{"mine.example.org"}}
	const dhcp, ra = "DHCP from 10.0.0.1", "RA from routers"
	time0 := map[string]string{"timeserver-10.0.0.3": dhcp}
	for name, test := range map[string]struct {
		configured         bool
		settings, platform config.Network
		want               map[string]string
	}{
		"leases": {want: map[string]string{"nameserver-10.0.0.2": dhcp, "searchdomain-dhcp.example.org": dhcp, "searchdomain-ra.example.org": ra}},
		"the platform": {true, config.Network{}, mine, map[string]string{
			"nameserver-10.9.0.1": byPlatform, "nameserver-10.9.0.2": byPlatform, "searchdomain-mine.example.org": byPlatform,
		}},
		"the configuration": {true, mine, config.Network{SearchDomains: []string{"platform.example.org"}}, map[string]string{
			"nameserver-10.9.0.1": "machine.network.nameservers[0]", "nameserver-10.9.0.2": "machine.network.nameservers[1]",
			"searchdomain-mine.example.org": "machine.network.searchDomains[0]",
		}},
		"one each": {true, config.Network{SearchDomains: mine.SearchDomains}, config.Network{}, map[string]string{
			"nameserver-10.0.0.2": dhcp, "searchdomain-mine.example.org": "machine.network.searchDomains[0]",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &owner{
				cfg: &config.Config{Machine: config.Machine{Network: test.settings}}, configured: test.configured,
				Daemon: New(Options{Store: resource.NewStore(), etcDir: t.TempDir(), physical: func(netlink.Link) bool { return true }}),
				links:  map[string]netlink.Link{"test0": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "test0", Index: 2}}},
				clients: map[leaseKey]*client{{"test0", "DHCP"}: {lease: &lease{ntp: []netip.Addr{addr("10.0.0.3")}, LeaseStatus: LeaseStatus{
					Source: "DHCP", Server: "10.0.0.1", Resolvers: []netip.Addr{addr("10.0.0.2")}, Search: []string{"dhcp.example.org"},
				}}}},
			}
			o.platform.network = test.platform
			o.advertise(2, []ndp.Option{&ndp.DNSSearchList{Lifetime: time.Hour, DomainNames: []string{"dhcp.example.org", "ra.example.org"}}}, time.Now())
			if err := o.writeAll(NodeAddress{}, false); err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			for _, s := range Servers.List(o.o.Store) {
				got[s.ID] = s.Spec.By
			}
			maps.Copy(test.want, time0)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
