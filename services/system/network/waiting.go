package network

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
)

// Reasons why the node waits.
const (
	LinkMissing    reason.Code = "LinkMissing"    // an interface doesn't exist
	NoCarrier      reason.Code = "NoCarrier"      // all exist, and none has a carrier
	DHCPUnanswered reason.Code = "DHCPUnanswered" // there is no answer on a link
	NoValidSubnet  reason.Code = "NoValidSubnet"  // there are addresses, but none that nodeIP.validSubnets allows
)

// lack is one thing that the node waits for.
func lack(code reason.Code, format string, args ...any) error {
	return reason.With(code, fmt.Errorf(format, args...))
}

// lacking is everything that the node waits for, sorted; empty after it has its addresses.
func (o *owner) lacking() (out []error) {
	listed := false
	for _, p := range o.plans {
		if p.Ignore || p.Name == "lo" || o.members[p.Name] != "" {
			continue // a bond works without some of its members
		}
		listed = listed || len(o.sources(p)) > 0 || len(p.Addresses) > 0
		_, here := o.links[p.Name]
		unanswered := o.unanswered(p)
		switch {
		case !here && o.errs[making+p.Name] != nil:
			out = append(out, o.errs[making+p.Name])
		case !here:
			out = append(out, lack(LinkMissing, "interface %q to appear", p.Name))
		case len(unanswered) > 0:
			out = append(out, unanswered...)
		case o.errs[p.Name] != nil:
			out = append(out, o.errs[p.Name])
		case len(o.applied[p.Name].addresses) < len(p.Addresses):
			out = append(out, lack("", "addresses on %q", p.Name))
		}
	}
	if !listed {
		out = append(out, o.lackingUnlisted()...)
	}
	slices.SortFunc(out, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return out
}

// unanswered are the missing answers for the leases of a link.
func (o *owner) unanswered(p config.Link) (out []error) {
	for _, s := range o.sources(p) {
		if c := o.clients[leaseKey{p.Name, s.name}]; c == nil || c.lease == nil {
			out = append(out, s.answerOn(p.Name))
		}
	}
	return out
}

// answerOn is the name of a source's answer in the reason of a wait.
func (s source) answerOn(link string) error {
	return lack(DHCPUnanswered, "%s answer on %q", s.name, link)
}

// lackingUnlisted: without listed links one address is enough. The other links have a
// grace period, and one that may get the address of an earlier boot has a longer one.
func (o *owner) lackingUnlisted() (without []error) {
	var names []string
	var bare []string // links that may still get the address of an earlier boot
	have, pinned := false, false
	for _, name := range o.order() {
		for _, s := range o.o.sources {
			c := o.clients[leaseKey{name, s.name}]
			if c == nil {
				continue
			}
			names = append(names, name)
			if c.lease != nil {
				have, pinned = true, pinned || c.lease.has(o.pinned)
				continue
			}
			if s.family == familyOf(o.pinned) {
				bare = append(bare, name)
			}
			if carrier(o.links[name]) {
				without = append(without, s.answerOn(name))
			}
		}
	}
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return []error{lack(LinkMissing, "a network card to appear")}
	case !have && len(without) == 0:
		return []error{lack(NoCarrier, "a link on %s", strings.Join(names, ", "))}
	case !have:
		o.firstAddr = time.Time{}
		return without
	}
	if o.firstAddr.IsZero() {
		o.firstAddr = time.Now()
	}
	grace := linkGrace
	if !pinned && len(bare) > 0 {
		grace = pinGrace
		without = append(without, lack("", "the address that the node has had, %s, on %s, for %s at most", o.pinned, strings.Join(bare, ", "), grace))
	}
	if time.Since(o.firstAddr) >= grace {
		return nil
	}
	return without
}

// reportWaiting reports what the service waits for, once per change, and at the console
// if a link doesn't appear. The reason is that of a missing link, if one is, else the first.
func (o *owner) reportWaiting(lacking []error) {
	var texts []string
	code, linkMissing := reason.Of(lacking[0]), false
	for _, l := range lacking {
		texts = append(texts, l.Error())
		if c := reason.Of(l); c == LinkMissing || c == NoCarrier {
			code, linkMissing = c, true
		}
	}
	what := strings.Join(texts, ", ")
	if what != o.waiting {
		o.waiting, o.since = what, time.Now()
		o.h.EventOf(code, "Waiting for "+what)
	}
	waited := time.Since(o.since)
	if o.linkWarned || waited < warnAfter || !linkMissing {
		return
	}
	o.linkWarned = true
	o.log.Warn(fmt.Sprintf("waiting for %s since %s; the interfaces here are: %s. "+
		"Plug it in, load its driver, or correct machine.network.interfaces",
		what, waited.Round(time.Second), strings.Join(slices.Sorted(maps.Keys(o.links)), ", ")))
}
