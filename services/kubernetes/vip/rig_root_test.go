package vip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/neighbor"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// far is another machine at the other end of a cable: a network namespace.
type far struct {
	t   *testing.T
	ns  netns.NsHandle
	mac net.HardwareAddr
	h   *netlink.Handle
}

// cable connects the link near, which it makes, and another machine.
func cable(t *testing.T, near string) *far {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	f := &far{t: t}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: near}, PeerName: "far-" + near}
	f.must(netlink.LinkAdd(veth))
	t.Cleanup(func() { netlink.LinkDel(veth) })
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var err error
		f.ns, err = netns.New()
		done <- err
	}()
	f.must(<-done)
	t.Cleanup(func() { f.ns.Close() })
	end, err := netlink.LinkByName("far-" + near)
	f.must(err)
	f.must(netlink.LinkSetNsFd(end, int(f.ns)))
	f.h, err = netlink.NewHandleAt(f.ns)
	f.must(err)
	t.Cleanup(f.h.Close)
	end, err = f.h.LinkByName("far-" + near)
	f.must(err)
	f.mac = end.Attrs().HardwareAddr
	f.must(f.h.LinkSetUp(end))
	f.must(netlink.LinkSetUp(veth))
	f.put(netip.MustParsePrefix("10.5.0.9/24"))
	f.put(netip.MustParsePrefix("fd00::9/64"))
	// Until a link has detected its carrier, its kernel silently drops what it sends.
	eventually.That(t, 5*time.Second, "the cable has a carrier at both ends", func() error {
		l, err := netlink.LinkByName(near)
		if err != nil {
			return err
		}
		if here, there := l.Attrs().OperState, f.link().Attrs().OperState; here != netlink.OperUp || there != netlink.OperUp {
			return fmt.Errorf("here it is %s, there %s", here, there)
		}
		return nil
	})
	return f
}

func (f *far) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// listen is the other machine's wire, and the frames that it receives.
func (f *far) listen(address netip.Addr) (w *neighbor.Wire, seen chan neighbor.Observed) {
	f.t.Helper()
	done := make(chan error)
	seen = make(chan neighbor.Observed, 64)
	go func() {
		runtime.LockOSThread()
		err := netns.Set(f.ns)
		if err == nil {
			w, err = neighbor.Open(f.link(), address, slog.New(slog.DiscardHandler), func(h neighbor.Observed) { offer(seen, h) })
		}
		done <- err
	}()
	f.must(<-done)
	return w, seen
}

// waitForFrame waits for a frame, and returns the frames before it.
func waitForFrame(t *testing.T, all chan neighbor.Observed, want neighbor.Observation, name string) (before []neighbor.Observation) {
	t.Helper()
	eventually.That(t, 10*time.Second, name, func() error {
		for {
			select {
			case h := <-all:
				if h.What == want {
					return nil
				}
				before = append(before, h.What)
			default:
				return errors.New("no such frame")
			}
		}
	})
	return before
}

func (f *far) link() netlink.Link {
	f.t.Helper()
	all, err := f.h.LinkList()
	f.must(err)
	for _, l := range all {
		if strings.HasPrefix(l.Attrs().Name, "far-") {
			return l
		}
	}
	f.t.Fatal("the other machine has no link")
	return nil
}

func addr(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
	if p.Addr().Is6() {
		a.Flags = alias(p.Addr()).Flags // at once
	}
	return a
}

func (f *far) put(p netip.Prefix) {
	f.t.Helper()
	f.must(f.h.AddrAdd(f.link(), addr(p)))
}

func (f *far) drop(p netip.Prefix) {
	f.t.Helper()
	f.must(f.h.AddrDel(f.link(), addr(p)))
}

// neighbour is the MAC address for address in the other machine's neighbour cache.
func (f *far) neighbour(address netip.Addr) string {
	f.t.Helper()
	all, err := f.h.NeighList(f.link().Attrs().Index, family(address))
	f.must(err)
	for _, n := range all {
		if n.IP.Equal(address.AsSlice()) {
			return n.HardwareAddr.String()
		}
	}
	return ""
}

// rig is a controller with etcd and API server replaced by the test.
type rig struct {
	*controller
	t    *testing.T
	end  func()
	mu   sync.Mutex // guards what follows
	view func() view
}

var both = []netip.Addr{shared4, shared6}

func newRig(t *testing.T, link string, address netip.Addr, etcdView func() view, changes ...func(*controller)) *rig {
	t.Helper()
	r := &rig{t: t, view: etcdView}
	store := resource.NewStore()
	as := store.As(network.ID)
	if err := errors.Join(
		network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2")}),
		network.Hostnames.Put(as, network.HostnameID, "self"),
	); err != nil {
		t.Fatal(err)
	}
	started := make(chan *controller)
	g, err := dag.New(dag.Options{Log: func(string) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }}, dag.Service{ID: ID, Run: func(ctx context.Context, h *dag.Handle) error {
		c := newController(shared{link, address}, store, h)
		for _, change := range changes {
			change(c)
		}
		started <- c
		c.run(ctx)
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r.controller = <-started
	wg.Go(func() {
		for ctx.Err() == nil {
			r.mu.Lock()
			if r.view != nil {
				w := r.view()
				w.askedAt = time.Now()
				offer(r.views, w)
			}
			r.mu.Unlock()
			offer(r.checks, [2]bool{false, true}) // more often than the controller's own checks fail
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	r.end = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(r.end)
	return r
}

// setView sets the view that etcd returns; nil: etcd doesn't answer.
func (r *rig) setView(f func() view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.view = f
}

func mine() view {
	return view{held: true, mine: true, own: true, holder: node{Name: "self"}, others: 2}
}

func (r *rig) status(budget time.Duration, name string, check func(Status) bool) {
	r.t.Helper()
	eventually.That(r.t, budget, name, func() error {
		o, err := Statuses.Get(r.store, r.address.String())
		if err == nil && !check(o.Spec) {
			err = fmt.Errorf("%+v", o.Spec)
		}
		return err
	})
}

func (r *rig) here() bool {
	r.t.Helper()
	l, err := netlink.LinkByName(r.link)
	if err != nil {
		r.t.Fatal(err)
	}
	there, err := has(l, r.address)
	if err != nil {
		r.t.Fatal(err)
	}
	return there
}
