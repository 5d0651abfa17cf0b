package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// A refused or removed object is set again after a pause that doubles from the first to the last: that for refused
	// ones, and a shorter one for those that another program removes again and again.
	againFirst   = time.Second
	againMax     = time.Minute
	againRemoved = 5 * time.Second
)

// errTaken is what duplicate address detection says.
var errTaken = errors.New("another host of the network has this address")

// attempt is the last time that an object was added.
type attempt struct {
	at    time.Time
	pause time.Duration // before the next one
	err   error         // what the kernel said
}

// reconcile makes the links, their objects, files and resources match the configuration.
func (o *owner) reconcile(ctx context.Context) {
	now := time.Now()
	o.due = now.Add(againMax)
	o.errs, o.tunnels = map[string]error{}, map[string]WireGuardStatus{}
	if err := o.look(false); err != nil {
		o.refused(stateKey, err)
		return
	}
	o.replan()
	o.build(ctx)
	o.want(ctx, now)
	for key := range o.clients {
		if !slices.Contains(o.order(), key.link) {
			o.stopClient(key)
		}
	}
	o.refused(stateKey, o.settle(now))
	o.watchAddresses(ctx)
	o.publish()
}

// stateKey is the key for errors of reading the kernel's state, among those of links: no link has this name.
const stateKey = "the state of the network"

// want collects the objects that all links want.
func (o *owner) want(ctx context.Context, now time.Time) {
	order, routes := uint32(0), taken{}
	o.wanted = o.memberships()
	for i, name := range o.order() {
		l := o.links[name]
		p, _ := o.plan(l)
		o.ask(ctx, l, p)
		o.refused(name, errors.Join(o.receive(l, p, defaultMetric+1+i), o.tune(l, p.Ethernet, now), bringUp(l)))
		if o.o.physical(l) {
			o.join(l.Attrs().Index)
		}
		index, leases := l.Attrs().Index, o.leases(name)
		for _, l := range leases {
			for _, a := range l.addresses {
				if a.until.After(now) {
					o.wake(a.until)
				}
			}
		}
		objects := wanted(index, p, leases, order, routes, now)
		if len(o.sources(p)) > 0 {
			order++
		}
		objects = append(objects, o.filtered(l, p)...)
		if before := o.of(index).mtu; before != 0 && !slices.ContainsFunc(objects, func(w want) bool { _, is := w.object.(mtu); return is }) {
			objects = append(objects, want{mtu{index, before}, "the kernel"})
		}
		if alias := o.aliases[name]; alias != "" && !strings.ContainsAny(alias, ":* ") {
			objects = append(objects, want{altname{index, alias}, byConfiguration})
		}
		o.wanted = append(o.wanted, objects...)
	}
	o.wanted = append(o.wanted, wantedRules(o.cfg.Machine.Network.Rules)...)
}

// memberships come first: a bond gives its MTU to a new member.
func (o *owner) memberships() (out []want) {
	for _, v := range o.virtuals {
		_, made := o.made[v.name]
		for _, name := range v.members {
			if l, master := o.links[name], o.links[v.name]; made && l != nil && master != nil {
				out = append(out, want{member{l.Attrs().Index, master.Attrs().Index}, byConfiguration})
			}
		}
	}
	return out
}

// filtered are the VLANs that a bridge and its ports have, if it filters them: those on top of it.
func (o *owner) filtered(bridge netlink.Link, p config.Link) (out []want) {
	if p.Bridge == nil || !p.Bridge.VLAN.VLANFiltering {
		return nil
	}
	for _, name := range o.order() {
		a := o.links[name].Attrs()
		for _, v := range p.VLANs {
			if v.Protocol != config.VLANOuter && (name == p.Name || a.MasterIndex == bridge.Attrs().Index && o.members[name] == p.Name) {
				out = append(out, want{tagged{a.Index, v.ID}, byConfiguration})
			}
		}
	}
	return out
}

// settle changes the kernel until it has the wanted objects, and no others of ours.
func (o *owner) settle(now time.Time) error {
	state, err := o.o.read()
	if err != nil {
		return err
	}
	objects := lists.Some(o.wanted, func(w want) (object, bool) {
		a, is := w.object.(address)
		return w.object, !is || !o.watches[a].first
	})
	remove, add := difference(state.objects, o.known, objects)
	var errs []error
	for _, r := range remove {
		err := o.o.change(r, false)
		if err == nil || slices.ContainsFunc([]error{unix.ESRCH, unix.EADDRNOTAVAIL, unix.ENODEV, unix.ENOENT}, func(gone error) bool { return errors.Is(err, gone) }) {
			delete(o.known, r)
			continue
		}
		errs = append(errs, fmt.Errorf("remove the %s: %w", r.on(o.linkName(r.link())), err))
	}
	o.refused("objects to remove", errors.Join(errs...))
	if len(remove) > 0 {
		// With an address, the kernel also drops the routes that depend on it and the other addresses of its network.
		before := state.objects
		if state, err = o.o.read(); err != nil {
			return err
		}
		_, add = difference(state.objects, o.known, objects)
		for _, a := range add {
			if before[a] {
				delete(o.attempts, a) // it has to be there again at once
			}
		}
	}
	for _, a := range add {
		o.set(a, now, state, len(remove) > 0)
	}
	for _, w := range objects {
		if state.objects[w] {
			o.known[w] = true
		}
	}
	maps.DeleteFunc(o.attempts, func(w object, a *attempt) bool {
		return !slices.Contains(objects, w) || state.objects[w] && now.Sub(a.at) > againMax
	})
	if len(add) > 0 {
		state, err = o.o.read()
	}
	o.state = state
	return err
}

// set adds an object that isn't there. There is a pause before the next attempt, so that
// neither a refusal nor another program that removes the object costs more than that.
func (o *owner) set(w object, now time.Time, state actual, removed bool) {
	a := o.attempts[w]
	if a == nil {
		a = &attempt{}
		o.attempts[w] = a
	}
	if next := a.at.Add(a.pause); now.Before(next) {
		o.wake(next)
		return
	}
	link := o.linkName(w.link())
	if m, is := w.(mtu); is && o.links[link] != nil {
		o.of(m.index).mtu = cmp.Or(o.of(m.index).mtu, o.links[link].Attrs().MTU)
	}
	a.at, a.pause = now, min(max(2*a.pause, againFirst), againMax)
	o.wake(now.Add(a.pause))
	err := o.o.change(w, true)
	_, failed := state.objects[w]
	switch {
	case err == nil && failed:
		err = errTaken // until duplicate address detection has ended
	case errors.Is(err, unix.EEXIST):
		err = errors.New("another program has one like it, which stays")
	case err == nil && o.known[w] && !removed:
		o.log.Warn(fmt.Sprintf("the %s was removed by another program; it is set again", w.on(link)))
	}
	if _, is := w.(member); is && err == nil {
		// a VRF moves the routes of its members
		o.dropped(w.link(), false)
		maps.DeleteFunc(state.objects, func(of object, _ bool) bool { return of.link() == w.link() })
	}
	if a.err = err; err == nil {
		o.known[w] = true
		a.pause = min(a.pause, againRemoved)
	}
}

// wake says that there is something to do at a time, whatever happens before.
func (o *owner) wake(at time.Time) {
	if at.Before(o.due) {
		o.due = at
	}
}

// linkName is the name of a link.
func (o *owner) linkName(index int) string {
	for name, l := range o.links {
		if l.Attrs().Index == index {
			return name
		}
	}
	return fmt.Sprintf("link %d", index)
}

// dropped notes that the kernel has dropped objects with their link's state: they weren't removed by a program.
func (o *owner) dropped(index int, gone bool) {
	for w := range o.known {
		if w.link() != index {
			continue
		}
		if o.known[w] = false; gone {
			delete(o.known, w)
		}
		delete(o.attempts, w)
	}
}

// problems are what the kernel refuses, and what the configuration demands and isn't there.
func (o *owner) problems() (out []string) {
	for _, name := range slices.Sorted(maps.Keys(o.errs)) {
		out = append(out, o.errs[name].Error())
	}
	for _, w := range o.wanted {
		if p := o.problem(w.object); p != "" {
			out = append(out, w.on(o.linkName(w.link()))+": "+p)
		}
	}
	if o.settled {
		if len(o.candidates()) == 0 {
			out = append(out, "the node has no address at the moment")
		}
		out = append(out, lists.Some(o.pending(), func(l lack) (string, bool) { return "waiting for " + l.Error(), l.listed })...)
	}
	for _, name := range o.order() {
		for _, l := range o.leases(name) {
			for _, p := range o.problemsOf(l) {
				out = append(out, fmt.Sprintf("%s lease on %s: %s", l.Source, name, p))
			}
		}
	}
	if o.platform.problem != nil {
		out = append(out, byPlatform+": "+o.platform.problem.Error())
	}
	declined := len(out)
	for _, d := range o.declined {
		if time.Now().Before(d.until) {
			out = append(out, d.problem)
		}
	}
	slices.Sort(out[declined:])
	return out
}

// problem is why a wanted object isn't there; "" if it is.
func (o *owner) problem(w object) string {
	a, isAddress := w.(address)
	there, listed := o.state.objects[w]
	switch tried := o.attempts[w]; {
	case isAddress && (listed && !there || o.state.tentative[a] && tried != nil && errors.Is(tried.err, errTaken)):
		return errTaken.Error()
	case isAddress && o.watches[a].other != "":
		return o.watches[a].String()
	case there:
	case tried != nil && tried.err != nil && tried.pause > againFirst:
		// a link that has just come up may refuse the first attempt
		return tried.err.Error()
	}
	return ""
}

// refused records what the kernel refused, until it is tried again.
func (o *owner) refused(name string, err error) {
	if err != nil {
		o.errs[name] = err
	}
}

// bringUp sets the link up if it isn't.
func bringUp(l netlink.Link) error {
	a := l.Attrs()
	if a.Flags&net.FlagUp != 0 {
		return nil
	}
	err := netlink.LinkSetUp(l)
	// The link below it isn't up yet, or this one is gone: the event comes back here.
	if err == nil || errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return fmt.Errorf("set %s up: %w", a.Name, err)
}

// physicalEthernet reports whether a link is a network card: its kind isn't a
// virtual one of the kernel (veth, bridge, vxlan …), and it is Ethernet.
func physicalEthernet(l netlink.Link) bool {
	a := l.Attrs()
	return l.Type() == "device" && a.EncapType == "ether" && a.Flags&net.FlagLoopback == 0
}
