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

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/vishvananda/netlink"
)

// shared is what the configuration says: an address, and the link that it is on.
type shared struct {
	link    string
	address netip.Addr
}

// controller looks after one shared address. Its state, and the link, belong to the
// goroutine of run.
type controller struct {
	shared
	store    *resource.Store
	h        *dag.Handle
	election *election

	views   chan view
	checks  chan [2]bool // whether etcd didn't count, and whether it went well
	frames  chan observed
	alone   atomic.Bool            // for the checks: etcd doesn't count
	silent  atomic.Pointer[string] // why etcd gave no view
	problem map[string]string      // by what it is about: what was told last
	there   bool                   // the address may be on a link

	// The kernel; tests have another.
	find   func(link string) (netlink.Link, error)
	remove func(netip.Addr) error // takes an address off all links

	state state
	wire  *wire // nil while there is no link
}

func newController(s shared, store *resource.Store, h *dag.Handle) *controller {
	k := &controller{
		shared: s, store: store, h: h,
		// What comes while the controller is busy, which it is for milliseconds, waits.
		views: make(chan view, 8), checks: make(chan [2]bool, 8), frames: make(chan observed, 64),
		problem: map[string]string{}, find: netlink.LinkByName, remove: remove,
		there: true, // of an earlier life, of which nobody knows whether it still may
	}
	k.election = newElection(store, s.address, k.told, k.lost)
	return k
}

// told and lost are called by the election, checked by the checks.
func (k *controller) told(w view) { offer(k.views, w) }

func (k *controller) lost(err error) {
	var why *string
	if err != nil {
		text := err.Error()
		why = &text
	}
	k.silent.Store(why)
}

// offer drops what nobody takes: a newer one comes.
func offer[T any](to chan T, v T) {
	select {
	case to <- v:
	default:
	}
}

// run keeps the address until ctx ends, or something panics: strangers have a say in
// what is decided. Then this node doesn't have it any more.
func (k *controller) run(ctx context.Context) {
	k.drop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	// The election ends last: nobody else may be elected while the address is here.
	cctx, stopClaim := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { k.election.run(cctx) })
	wg.Go(func() { k.check(ctx) })
	_ = dag.Guard(k.h.Log, func() error { k.loop(ctx); return nil })
	cancel()
	for range dropTries {
		k.drop()
	}
	if k.wire != nil {
		k.note("wire", k.wire.close())
	}
	if k.state.hold {
		k.h.Log.Info(fmt.Sprintf("gave %s up: the service ends", k.address))
	}
	stopClaim()
	wg.Wait()
	_ = Statuses.Delete(k.store.As(ID), k.address.String()) // it is ours, so it can be deleted
}

// drop takes the address off the link, if it isn't known to be off already: one that
// stays there is on two nodes soon.
func (k *controller) drop() {
	if !k.there {
		return
	}
	err := k.remove(k.address)
	k.note("address", err)
	k.there = err != nil
}

func (k *controller) loop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var next, least time.Time // when there is something to do, and when at the soonest for a frame
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case w := <-k.views:
			k.state.view = w
		case c := <-k.checks:
			k.state.checked(c[0], c[1])
		case h := <-k.frames:
			k.state.observe(time.Now(), h)
			if now := time.Now(); now.Before(least) && least.Before(next) {
				timer.Reset(least.Sub(now))
				continue
			}
		}
		again := k.step(time.Now())
		next, least = time.Now().Add(again), time.Now().Add(frameEvery)
		timer.Reset(again)
	}
}

// check asks the API server again and again.
func (k *controller) check(ctx context.Context) {
	c := &checker{store: k.store}
	defer c.close()
	for {
		path, alone := ready, k.alone.Load()
		if alone {
			path = readyAlone
		}
		offer(k.checks, [2]bool{alone, c.check(ctx, path) == nil})
		select {
		case <-ctx.Done():
			return
		case <-time.After(checkEvery):
		}
	}
}

// step looks at the link, decides, and does what was decided.
func (k *controller) step(now time.Time) (again time.Duration) {
	l, err := k.attach()
	k.note("link", err)
	if err == nil {
		if stats := l.Attrs().Statistics; stats != nil {
			k.state.counted(now, stats.RxPackets)
		}
	}
	before := k.state.hold
	o := k.state.decide(now)
	k.alone.Store(o.alone)
	switch {
	case !o.hold:
		k.drop() // before the election is given up
	case l != nil:
		k.there = true
		k.note("address", k.ensure(l))
	}
	k.say(before)
	k.election.want(k.self(l, o))
	if k.wire != nil && o.announce {
		k.note("announce", k.wire.send(announcements(k.wire.mac, k.address)...))
	}
	if k.wire != nil && o.probe {
		k.note("ask", k.ask(l, o))
	}
	if k.wire != nil && o.keepalive != nil {
		k.note("keepalive", k.wire.send(keepalive(k.wire.mac, o.keepalive, k.address)))
	}
	if k.wire != nil && o.lookAfter {
		k.note("look after", k.lookAfter(o.evict))
	}
	k.publish()
	return o.again
}

// lookAfter asks the holder's machine whether it is there, or has etcd go on without.
func (k *controller) lookAfter(gone string) error {
	w := &k.state.view
	var err error
	if gone != "" {
		err = fmt.Errorf("%s, which holds %s, %s on %s any more: etcd is to elect another one", w.holder.Name, k.address, gone, k.link)
		offer(k.election.out, *w)
	}
	to, bad := net.ParseMAC(w.holder.MAC)
	if bad != nil {
		return errors.Join(err, bad)
	}
	return errors.Join(err, k.wire.send(question(k.wire.mac, to, k.address)))
}

// attach finds the link, and listens on it. A link that was made anew is another one.
func (k *controller) attach() (netlink.Link, error) {
	l, err := k.find(k.link)
	if err != nil {
		err = fmt.Errorf("link %s: %w", k.link, err)
	}
	if k.wire != nil && (err != nil || k.wire.index != l.Attrs().Index || k.wire.mac.String() != l.Attrs().HardwareAddr.String() || isClosed(k.wire.dead)) {
		k.note("wire", k.wire.close())
		k.wire = nil
	}
	if err != nil {
		return nil, err
	}
	if k.wire == nil {
		if k.wire, err = openWire(l, k.address, k.h.Log, func(h observed) { offer(k.frames, h) }); err != nil {
			return nil, err
		}
		k.state.mac = k.wire.mac
	}
	return l, nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// ensure puts the address on the link, also on one that has lost it, or was made anew:
// that is to be announced.
func (k *controller) ensure(l netlink.Link) error {
	if there, err := has(l, k.address); there || err != nil {
		return err
	}
	k.state.defended = time.Time{}
	return put(l, k.address)
}

// self is this node as a candidate, nil if it isn't one. One without the link is none.
func (k *controller) self(l netlink.Link, o orders) *node {
	address, err := network.Addresses.Get(k.store, network.AddressID)
	name, err2 := network.Hostnames.Get(k.store, network.HostnameID)
	if errors.Join(err, err2) != nil || l == nil || !o.candidate {
		return nil
	}
	return &node{Name: name.Spec, Address: address.Spec.Primary, MAC: l.Attrs().HardwareAddr.String()}
}

// ask asks for another holder; stale also for whoever else may be on the link.
func (k *controller) ask(l netlink.Link, o orders) error {
	targets := []netip.Addr{k.address}
	if o.stale {
		targets = append(targets, neighbours(l, k.address)...)
		for _, n := range k.state.view.nodes {
			if n.Address.IsValid() && n.Address.Is4() == k.address.Is4() && len(targets) < maxNeighbours {
				targets = append(targets, n.Address)
			}
		}
	}
	var errs []error
	for _, t := range targets {
		errs = append(errs, k.wire.send(question(k.wire.mac, nil, t)))
	}
	return errors.Join(errs...)
}

// say tells the story of the address.
func (k *controller) say(before bool) {
	s := &k.state
	if s.hold != before {
		text := fmt.Sprintf("gave %s up: %s", k.address, s.why)
		if s.hold {
			text = fmt.Sprintf("this node has %s, on %s: %s", k.address, k.link, s.why)
		}
		k.h.Event(text)
		k.h.Log.Info(text)
	}
	var taken error
	if s.foreign != "" {
		taken = fmt.Errorf("the machine %s on %s has %s, too, and is none of the control planes that share it: give it another address, or choose another one for machine.network.interfaces[].vip.ip",
			s.foreign, k.link, k.address)
	}
	k.note("foreign", taken)
}

// note tells what goes wrong, once for each change.
func (k *controller) note(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if k.problem[what] == text {
		return
	}
	if text != "" {
		k.h.Log.Warn(text, slog.String("address", k.address.String()))
	}
	k.problem[what] = text
}

func (k *controller) publish() {
	s := &k.state
	status := Status{
		Address: k.address, Link: k.link, Holder: s.hold, Why: s.why, Since: s.changed,
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
	if why := k.silent.Load(); why != nil {
		status.Etcd = *why
	}
	_ = Statuses.Put(k.store.As(ID), k.address.String(), status) // the service is its only writer
}
