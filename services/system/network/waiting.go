package network

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// lacking is what the node waits for, sorted; empty once it has its addresses.
func (o *owner) lacking() []string {
	var out []string
	listed := false
	for _, p := range o.plans {
		if p.Ignore || p.Name == "lo" || o.members[p.Name] != "" {
			continue // a bond works without some of its members
		}
		listed = listed || p.DHCP || len(p.Addresses) > 0
		_, here := o.links[p.Name]
		switch {
		case !here && o.errs[making+p.Name] != nil:
			out = append(out, o.errs[making+p.Name].Error())
		case !here:
			out = append(out, fmt.Sprintf("interface %q to appear", p.Name))
		case p.DHCP && o.leases[p.Name] == nil:
			out = append(out, fmt.Sprintf("DHCP answer on %q", p.Name))
		case o.errs[p.Name] != nil:
			out = append(out, o.errs[p.Name].Error())
		case len(o.applied[p.Name].addresses) < len(p.Addresses):
			out = append(out, fmt.Sprintf("addresses on %q", p.Name))
		}
	}
	if !listed {
		out = append(out, o.lackingUnlisted()...)
	}
	slices.Sort(out)
	return out
}

// lackingUnlisted: without listed links one address is enough, but the other
// links get a moment, and one that may have the address of an earlier boot longer.
func (o *owner) lackingUnlisted() []string {
	var without, names, bare []string
	have, pinned := false, false
	for _, name := range o.order() {
		if c := o.clients[name]; c == nil {
			continue
		}
		names = append(names, name)
		if l := o.leases[name]; l != nil {
			have, pinned = true, pinned || l.address.Addr() == o.pinned
			continue
		}
		bare = append(bare, name)
		if carrier(o.links[name]) {
			without = append(without, fmt.Sprintf("DHCP answer on %q", name))
		}
	}
	switch {
	case len(names) == 0:
		return []string{"a network interface to appear"}
	case !have && len(without) == 0:
		return []string{"a link on " + strings.Join(names, ", ")}
	case !have:
		o.firstAddr = time.Time{}
		return without
	}
	if o.firstAddr.IsZero() {
		o.firstAddr = time.Now()
	}
	grace := linkGrace
	if o.pinned.Is4() && !pinned && len(bare) > 0 { // as those that DHCP gives are
		grace = pinGrace
		without = append(without, fmt.Sprintf("the address that the node has had, %s, on %s, for %s at most", o.pinned, strings.Join(bare, ", "), grace))
	}
	if time.Since(o.firstAddr) >= grace {
		return nil
	}
	return without
}

// reportWaiting reports what the service waits for, once per change, and at the console
// if a link doesn't appear.
func (o *owner) reportWaiting(lacking []string) {
	text := "Waiting for " + strings.Join(lacking, ", ")
	if text != o.waiting {
		o.waiting, o.since = text, time.Now()
		o.h.Event(text)
	}
	waited := time.Since(o.since)
	if o.linkWarned || waited < warnAfter || !strings.Contains(text, "appear") && !strings.Contains(text, "a link on") {
		return
	}
	o.linkWarned = true
	o.log.Warn(fmt.Sprintf("waiting for %s since %s; the interfaces here are: %s. "+
		"Plug it in, load its driver, or correct machine.network.interfaces",
		strings.Join(lacking, ", "), waited.Round(time.Second), strings.Join(slices.Sorted(maps.Keys(o.links)), ", ")))
}
