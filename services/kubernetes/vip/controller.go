package vip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/neighbor"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// checkEvery is how often this node's API server is checked, and checkTimeout how long
	// one check may take.
	checkEvery   = time.Second
	checkTimeout = 2 * time.Second

	ready = "/readyz"
	// readyAlone leaves out the checks that need etcd's quorum. A holder keeps the address
	// without a quorum: no other node would be better.
	readyAlone = ready + "?exclude=etcd&exclude=etcd-readiness"
)

// shared is an address of the configuration, and the link that it is on.
type shared struct {
	link    string
	address netip.Addr
}

// controller manages one shared address. Only the goroutine of run uses state and wire.
type controller struct {
	shared
	store    *resource.Store
	h        *dag.Handle
	election *election

	views     chan view
	checks    chan [2]bool // whether the check left out etcd, and whether it succeeded
	frames    chan neighbor.Observed
	alone     atomic.Bool           // for the checks: etcd doesn't count
	etcdError atomic.Pointer[error] // why etcd gave no view
	problem   map[string]string     // by operation: the last error that was logged
	onLink    bool                  // the address may be on a link

	// Calls of the kernel; tests replace them.
	find   func(link string) (netlink.Link, error)
	remove func(netip.Addr) error // removes an address from all links

	state state
	wire  *neighbor.Wire // nil while there is no link
}

func newController(s shared, store *resource.Store, h *dag.Handle) *controller {
	c := &controller{
		shared: s, store: store, h: h,
		// Buffers, because the controller can be busy for milliseconds.
		views: make(chan view, 8), checks: make(chan [2]bool, 8), frames: make(chan neighbor.Observed, 64),
		problem: map[string]string{}, remove: remove,
		find:   func(link string) (netlink.Link, error) { return netlink.LinkByName(network.KernelName(store, link)) },
		onLink: true, // it may be left from before a restart
	}
	c.election = newElection(store, s.address,
		func(w view) { offer(c.views, w) }, func(err error) { c.etcdError.Store(&err) })
	return c
}

// offer sends v if the channel has room. Otherwise v is dropped: a newer one comes.
func offer[T any](to chan T, v T) {
	select {
	case to <- v:
	default:
	}
}

// run manages the address until ctx ends, or a decision panics: frames of any machine on
// the link influence it. When run returns, this node doesn't have the address any more.
func (c *controller) run(ctx context.Context) {
	c.drop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	// The election ends last: no other node may be elected while the address is here.
	cctx, stopElection := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { c.election.run(cctx) })
	wg.Go(func() { c.check(ctx) })
	_ = dag.Guard(c.h.Log, func() error { c.loop(ctx); return nil })
	cancel()
	for range dropTries {
		c.drop()
	}
	if c.wire != nil {
		c.note("wire", c.wire.Close())
	}
	if c.state.hold {
		c.h.Log.Info(fmt.Sprintf("gave %s up: the service ends", c.address))
	}
	stopElection()
	wg.Wait()
	_ = Statuses.Delete(c.store.As(ID), c.address.String()) // the service is its only writer
}

// drop removes the address from the link, unless it is known to be removed: an address
// that stays there is soon on two nodes.
func (c *controller) drop() {
	if !c.onLink {
		return
	}
	err := c.remove(c.address)
	c.note("address", err)
	c.onLink = err != nil
}

func (c *controller) loop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var next, least time.Time // of the next step, and the earliest time of a step for a frame
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case w := <-c.views:
			c.state.view = w
		case api := <-c.checks:
			c.state.checked(api[0], api[1])
		case h := <-c.frames:
			c.state.observe(time.Now(), h)
			if now := time.Now(); now.Before(least) && least.Before(next) {
				timer.Reset(least.Sub(now))
				continue
			}
		}
		again := c.step(time.Now())
		next, least = time.Now().Add(again), time.Now().Add(frameEvery)
		timer.Reset(again)
	}
}

// check probes this node's API server every checkEvery.
func (c *controller) check(ctx context.Context) {
	var client kubeclient.Kept
	defer client.Close()
	for range sleep.Every(ctx, checkEvery) {
		path, alone := ready, c.alone.Load()
		if alone {
			path = readyAlone
		}
		offer(c.checks, [2]bool{alone, askAPIServer(ctx, c.store, &client, path) == nil})
	}
}

// step examines the link, decides, and acts on the decision.
func (c *controller) step(now time.Time) (again time.Duration) {
	l, err := c.attach()
	c.note("link", err)
	if err == nil {
		if stats := l.Attrs().Statistics; stats != nil {
			c.state.counted(now, stats.RxPackets)
		}
	}
	before := c.state.hold
	o := c.state.decide(now)
	c.alone.Store(o.alone)
	switch {
	case !o.hold:
		c.drop() // before this node leaves the election
	case l != nil:
		c.onLink = true
		c.note("address", c.ensure(l))
	}
	c.reportChange(before)
	c.election.setCandidate(c.self(l, o))
	if c.wire != nil && o.announce {
		c.note("announce", c.wire.Send(neighbor.Announcements(c.wire.MAC, c.address)...))
	}
	if c.wire != nil && o.probe {
		c.note("probe", c.probe(l, o))
	}
	if c.wire != nil && o.keepalive != nil {
		c.note("keepalive", c.wire.Send(neighbor.KeepaliveFrame(c.wire.MAC, o.keepalive, c.address)))
	}
	if c.wire != nil && o.checkHolder {
		c.note("holder", c.checkHolder(o.evict))
	}
	c.publish()
	return o.again
}

// checkHolder sends a probe to the holder's machine. With a reason it evicts the holder
// from the queue in etcd first.
func (c *controller) checkHolder(reason string) error {
	w := &c.state.view
	var err error
	if reason != "" {
		err = fmt.Errorf("%s, which holds %s, %s, on link %s: evicting it in etcd, so that another node is elected", w.holder.Name, c.address, reason, c.link)
		offer(c.election.evictions, *w)
	}
	to, bad := net.ParseMAC(w.holder.MAC)
	if bad != nil {
		return errors.Join(err, bad)
	}
	return errors.Join(err, c.wire.Send(neighbor.ProbeFrame(c.wire.MAC, to, c.address)))
}

// attach finds the link, and opens a wire on it; a new wire if the link was made again.
func (c *controller) attach() (netlink.Link, error) {
	l, err := c.find(c.link)
	if err != nil {
		err = fmt.Errorf("link %s: %w", c.link, err)
	}
	if c.wire != nil && (err != nil || c.wire.Index != l.Attrs().Index || c.wire.MAC.String() != l.Attrs().HardwareAddr.String() || sleep.Closed(c.wire.Dead)) {
		c.note("wire", c.wire.Close())
		c.wire = nil
	}
	if err != nil {
		return nil, err
	}
	if c.wire == nil {
		if c.wire, err = neighbor.Open(l, c.address, c.h.Log, func(h neighbor.Observed) { offer(c.frames, h) }); err != nil {
			return nil, err
		}
		c.state.mac = c.wire.MAC
	}
	return l, nil
}

// ensure adds the address to the link if it isn't there, for example after the
// link was made again. Then the address is announced again.
func (c *controller) ensure(l netlink.Link) error {
	if onLink, err := has(l, c.address); onLink || err != nil {
		return err
	}
	c.state.defended = time.Time{}
	return put(l, c.address)
}

// self is this node as a candidate. It is nil if the node isn't one; without
// the link, or the cable of that, it isn't.
func (c *controller) self(l netlink.Link, o orders) *node {
	address, err := network.Addresses.Get(c.store, network.AddressID)
	name, err2 := network.Hostnames.Get(c.store, network.HostnameID)
	if errors.Join(err, err2) != nil || l == nil || l.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 || !o.candidate {
		return nil
	}
	return &node{Name: name.Spec, Address: address.Spec.Primary, MAC: l.Attrs().HardwareAddr.String()}
}

// probe sends probes for the address. With a stale view it also probes routers and other
// control planes, to find out whether this node is cut off.
func (c *controller) probe(l netlink.Link, o orders) error {
	targets := []netip.Addr{c.address}
	if o.stale {
		targets = append(targets, neighbours(l, c.address)...)
		for _, n := range c.state.view.nodes {
			if n.Address.IsValid() && n.Address.Is4() == c.address.Is4() && len(targets) < maxNeighbours {
				targets = append(targets, n.Address)
			}
		}
	}
	return errors.Join(lists.Of(targets, func(t netip.Addr) error { return c.wire.Send(neighbor.ProbeFrame(c.wire.MAC, nil, t)) })...)
}

// reportChange logs that this node took the address or gave it up, and logs a foreign
// machine that has it.
func (c *controller) reportChange(before bool) {
	s := &c.state
	if s.hold != before {
		text := fmt.Sprintf("gave %s up: %s", c.address, s.why)
		if s.hold {
			text = fmt.Sprintf("this node has %s, on %s: %s", c.address, c.link, s.why)
		}
		c.h.Event(text)
		c.h.Log.Info(text)
	}
	var taken error
	if s.foreign != "" {
		taken = fmt.Errorf("the machine %s on %s has %s, too, and isn't one of the control planes that share it: give it another address, or choose another one for machine.network.interfaces[].vip.ip",
			s.foreign, c.link, c.address)
	}
	c.note("foreign", taken)
}

// note logs an error of the operation what, once for each change.
func (c *controller) note(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if c.problem[what] == text {
		return
	}
	if text != "" {
		c.h.Log.Warn(text, slog.String("address", c.address.String()))
	}
	c.problem[what] = text
}

func (c *controller) publish() {
	s := &c.state
	status := Status{
		Address: c.address, Link: c.link, Holder: s.hold, Why: s.why, Since: s.changed,
		Known: !s.stale(time.Now()), Conflict: s.foreign,
	}
	if status.Known && s.view.held {
		status.HeldBy = s.view.holder.Name
	}
	if status.Known {
		status.Candidates = s.view.others
		if s.view.own {
			status.Candidates++
		}
	}
	if err := c.etcdError.Load(); err != nil && *err != nil {
		status.Etcd = (*err).Error()
	}
	_ = Statuses.Put(c.store.As(ID), c.address.String(), status) // the service is its only writer
}

// askAPIServer requests one of the paths above from this node's API server, over one connection.
func askAPIServer(ctx context.Context, store *resource.Store, client *kubeclient.Kept, path string) error {
	keys, err := secrets.Kubernetes.Get(store, secrets.KubernetesID)
	if err != nil {
		return err
	}
	if err := client.Use(keys.Spec.Administrator(keys.Spec.LocalEndpoint, "")); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	_, err = client.Text(ctx, path)
	return err
}
