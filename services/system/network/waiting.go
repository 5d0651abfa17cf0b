package network

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"golang.org/x/sys/unix"
)

// Reasons why the node waits.
const (
	LinkMissing    reason.Code = "LinkMissing"    // an interface doesn't exist
	NoCarrier      reason.Code = "NoCarrier"      // all exist, and none has a carrier
	DHCPUnanswered reason.Code = "DHCPUnanswered" // there is no answer on a link
	AddressTaken   reason.Code = "AddressTaken"   // another host has the address
	NoValidSubnet  reason.Code = "NoValidSubnet"  // there are addresses, but none that nodeIP.validSubnets allows
)

// How long a node that has an address waits for other links. It waits for its first address without an end, because
// nothing can go on without one.
const (
	// linkGrace is for links that have a carrier, so that the node's address doesn't depend on which server was faster,
	// and for a name server of a node with servers or routers.
	linkGrace = 5 * time.Second
	// listedGrace is for links that the configuration lists, while the node's address isn't chosen for good.
	listedGrace = 30 * time.Second
	// pinGrace is for the address of an earlier boot: etcd and others identify the node by it. After a loss of power, a
	// server or a switch may start more slowly than the machine.
	pinGrace = time.Minute
)

// requiredGrace is for links with required: true.
var requiredGrace = 2 * time.Minute

// lack is one thing that isn't there yet.
type lack struct {
	error
	most   time.Duration // how long a node with an address waits for it
	listed bool          // the configuration demands it
}

func lackOf(code reason.Code, format string, args ...any) error {
	return reason.With(code, fmt.Errorf(format, args...))
}

// pending is everything that isn't there yet. Cards that the configuration doesn't list count if it gives no address.
func (o *owner) pending() (out []lack) {
	var bare, advertised, unplugged []string // bare: links that may still get the address of an earlier boot
	addressed, plugged := false, false
	for i, p := range append(slices.Clip(o.plans), o.unlisted()...) {
		listed := i < len(o.plans)
		l, here := o.links[p.Name]
		if p.Ignore || p.Name == "lo" || here && o.members[p.Name] != "" || !listed && addressed {
			continue
		}
		if here {
			p, _ = o.plan(l)
		}
		if addressed = addressed || listed && (len(o.sources(p)) > 0 || len(p.Addresses) > 0 || p.Advertised()); o.acceptsRA(p) {
			advertised = append(advertised, p.Name)
		}
		lacks := o.lacksOf(p)
		if len(lacks) > 0 || o.pinned.Is6() && o.acceptsRA(p) {
			bare = append(bare, p.Name)
		}
		if plugged = plugged || !listed && carrier(l); !listed && !carrier(l) {
			unplugged, lacks = append(unplugged, p.Name), nil
		}
		for _, err := range lacks {
			out = append(out, lack{err, o.grace(p, listed), listed})
		}
	}
	add := func(most time.Duration, code reason.Code, format string, args ...any) {
		out = append(out, lack{lackOf(code, format, args...), most, false})
	}
	switch {
	case addressed || plugged:
	case len(unplugged) > 0:
		add(0, NoCarrier, "a link on %s", strings.Join(unplugged, ", "))
	case len(advertised) > 0:
		add(0, DHCPUnanswered, "a router advertisement on %s", strings.Join(advertised, ", "))
	default:
		add(0, LinkMissing, "a network card to appear")
	}
	if o.pinned.IsValid() && !o.hasPinned() && len(bare) > 0 {
		add(pinGrace, "", "the address that the node has had, %s, on %s, for %s at most", o.pinned, strings.Join(bare, ", "), pinGrace)
	}
	for _, w := range o.wanted {
		a, is := w.object.(address)
		watch, watched := o.watches[a]
		switch problem := o.problem(w.object); {
		case watch.first || is && problem == errTaken.Error():
			add(0, AddressTaken, "the %s to be free: %s", a.on(o.linkName(a.index)), problem)
		case watched && !watch.asked:
			add(probeGrace, "", "an answer of other hosts that have the %s, for %s at most", a.on(o.linkName(a.index)), probeGrace)
		}
	}
	slices.SortFunc(out, func(a, b lack) int { return strings.Compare(a.Error(), b.Error()) })
	return out
}

// hasPinned reports whether the node has the address of an earlier boot.
func (o *owner) hasPinned() bool {
	return slices.ContainsFunc(o.candidates(), func(c candidate) bool { return c.prefix.Addr() == o.pinned })
}

// unlisted are the plans of cards that the configuration doesn't list.
func (o *owner) unlisted() []config.Link {
	return lists.Some(o.order(), func(name string) (config.Link, bool) {
		p, _ := o.plan(o.links[name])
		return p, len(o.sources(p)) > 0 && !slices.ContainsFunc(o.plans, func(l config.Link) bool { return l.Name == name })
	})
}

// lacksOf is what a listed link lacks.
func (o *owner) lacksOf(p config.Link) (out []error) {
	l, here := o.links[p.Name]
	if !here {
		return []error{cmp.Or(o.errs[making+p.Name], lackOf(LinkMissing, "interface %q to appear", p.Name))}
	}
	if p.Required && !carrier(l) {
		out = append(out, lackOf(NoCarrier, "a carrier on %q", p.Name))
	}
	for _, s := range o.sources(p) {
		if c := o.clients[leaseKey{p.Name, s.name}]; c == nil || c.lease == nil {
			out = append(out, lackOf(DHCPUnanswered, "%s answer on %q", s.name, p.Name))
		}
	}
	for _, a := range p.Addresses {
		if own := (address{l.Attrs().Index, a}); (!o.state.objects[own] || o.state.tentative[own]) && o.problem(own) == "" {
			out = append(out, lackOf("", "address %s on %q", a, p.Name))
		}
	}
	if p.Advertised() && !slices.ContainsFunc(o.state.advertised, func(w want) bool {
		a, is := w.object.(address)
		return is && a.index == l.Attrs().Index && !o.state.tentative[a]
	}) {
		out = append(out, lackOf(DHCPUnanswered, "router advertisement on %q", p.Name))
	}
	return out
}

// grace is how long a node with an address waits for a link.
func (o *owner) grace(p config.Link, listed bool) time.Duration {
	l, here := o.links[p.Name]
	switch {
	case errors.Is(o.errs[making+p.Name], unix.EOPNOTSUPP) || o.members[p.Name] != "":
		// the kernel doesn't have such links, and never will; a bond or bridge works without some of its members
		return 0
	case p.Required:
		return requiredGrace
	case listed && !o.hasPinned():
		return listedGrace
	case here && carrier(l):
		return linkGrace
	}
	return 0
}

// lacking is what the node waits for; empty when it can go on.
func (o *owner) lacking(all []candidate) (out []error) {
	if len(all) == 0 {
		o.firstAddr = time.Time{}
	} else if o.firstAddr.IsZero() {
		o.firstAddr = time.Now()
	}
	servers, _ := o.nameServers()
	out = lists.Some(o.pending(), func(l lack) (error, bool) { return l.error, len(all) == 0 || time.Since(o.firstAddr) < l.most })
	switch {
	case len(all) == 0 && len(out) == 0:
		out = append(out, lackOf(NoValidSubnet, "an address that machine.kubelet.nodeIP.validSubnets allows"))
	case len(all) > 0 && len(servers) == 0 && o.served() && time.Since(o.firstAddr) < linkGrace:
		out = append(out, lackOf("", "a name server, for %s at most", linkGrace))
	}
	return out
}

// served reports whether a server or a router may have more for the node.
func (o *owner) served() bool { return len(o.clients)+len(o.state.advertised) > 0 }

// reportWaiting reports what the service waits for, once per change, and at the console
// if a link doesn't appear. The reason is that of a missing link, if one is, else the first.
func (o *owner) reportWaiting(lacking []error) {
	missing := slices.IndexFunc(lacking, func(err error) bool { c := reason.Of(err); return c == LinkMissing || c == NoCarrier })
	what := strings.Join(lists.Of(lacking, error.Error), ", ")
	if what != o.waiting {
		o.waiting, o.since = what, time.Now()
		o.h.EventOf(reason.Of(lacking[max(missing, 0)]), "Waiting for "+what)
	}
	waited := time.Since(o.since)
	if o.linkWarned || waited < warnAfter || missing < 0 {
		return
	}
	o.linkWarned = true
	o.log.Warn(fmt.Sprintf("waiting for %s since %s; the interfaces here are: %s. "+
		"Plug it in, load its driver, or correct machine.network.interfaces",
		what, waited.Round(time.Second), strings.Join(slices.Sorted(maps.Keys(o.links)), ", ")))
}
