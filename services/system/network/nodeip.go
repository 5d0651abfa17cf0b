package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
)

// candidate is a possible address of the node.
type candidate struct {
	prefix netip.Prefix
	link   string
	// metric of the link's default route; noDefault where it has none.
	metric uint32
}

const noDefault = ^uint32(0)

// eligible reports whether an address can be the node's.
func eligible(a netip.Addr, valid []netip.Prefix) bool {
	allowed := len(valid) == 0 || slices.ContainsFunc(valid, func(v netip.Prefix) bool { return v.Contains(a) })
	return allowed && a.IsGlobalUnicast() // others, such as link-local ones, can't be reached from other nodes
}

// present are the wanted objects that are there, then those of router advertisements.
func (o *owner) present() []want {
	there := slices.DeleteFunc(slices.Clone(o.wanted), func(w want) bool { return !o.state.objects[w.object] })
	return append(there, o.state.advertised...)
}

// candidates are those of all links.
func (o *owner) candidates() (out []candidate) {
	for _, name := range o.order() {
		p, _ := o.plan(o.links[name])
		if p.Table != 0 {
			continue // in a VRF, where the cluster isn't
		}
		index, metric, first := o.links[name].Attrs().Index, noDefault, len(out)
		for _, w := range o.present() {
			switch w := w.object.(type) {
			case route:
				if w.index == index && w.network.Bits() == 0 && w.table == unix.RT_TABLE_MAIN {
					metric = min(metric, w.metric)
				}
			case address:
				if w.index == index && !o.state.tentative[w] && eligible(w.prefix.Addr(), o.cfg.Machine.Kubelet.NodeIP.ValidSubnets) {
					out = append(out, candidate{prefix: w.prefix, link: name})
				}
			}
		}
		for i := range out[first:] {
			out[first+i].metric = metric
		}
	}
	return out
}

// choose selects the node's address by one rule: the link with the default
// route of the lowest metric, IPv4 before IPv6, the first address of the link.
// The address of an earlier boot is kept as long as the node has it.
func choose(all []candidate, pinned netip.Addr) (NodeAddress, bool) {
	if len(all) == 0 {
		return NodeAddress{}, false
	}
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.metric, b.metric), cmp.Compare(a.prefix.Addr().BitLen(), b.prefix.Addr().BitLen()))
	})
	n := NodeAddress{Primary: sorted[0].prefix.Addr(), Why: why(sorted)}
	for _, c := range sorted {
		n.All = append(n.All, c.prefix)
		if c.prefix.Addr() == pinned && pinned != n.Primary {
			n.Primary = pinned
			n.Why = fmt.Sprintf("on %s; chosen earlier and still there (by the rule it would be %s: %s)", c.link, sorted[0].prefix.Addr(), n.Why)
		}
	}
	return n, true
}

func why(sorted []candidate) string {
	c := sorted[0]
	family := map[int]string{32: "IPv4", 128: "IPv6"}[c.prefix.Addr().BitLen()]
	switch {
	case len(sorted) == 1:
		return "the only address, on " + c.link
	case c.metric == noDefault:
		return fmt.Sprintf("the first %s address, on %s; no link has a default route", family, c.link)
	}
	return fmt.Sprintf("the first %s address of %s, which has the default route with the lowest metric (%d)", family, c.link, c.metric)
}

// nameFile is where the node's name is kept, beside its address.
func nameFile(pinFile string) string { return filepath.Join(filepath.Dir(pinFile), "node-name") }

func keep(file, text string) error { return boot.WriteFile(file, []byte(text+"\n"), 0o644) }
