package network

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// maxNeighbors bounds the published entries: other hosts can make the kernel learn many.
const maxNeighbors = 256

// Neighbor is an entry of the kernel's table of neighbours (ARP, ND) for a link that networkd configures.
type Neighbor struct {
	Link    string     `yaml:"link" column:"LINK"`
	Address netip.Addr `yaml:"address" column:"ADDRESS"`
	MAC     string     `yaml:"mac,omitempty" column:"MAC"`
	State   string     `yaml:"state" column:"STATE"` // as ip-neighbour(8) names it
}

// Neighbors have the link and the address as ID.
var Neighbors = kindOf[Neighbor]("Neighbors", "Neighbor")

// neighborStates are NUD_… of linux/neighbour.h.
var neighborStates = map[int]string{
	netlink.NUD_INCOMPLETE: "incomplete", netlink.NUD_REACHABLE: "reachable", netlink.NUD_STALE: "stale", netlink.NUD_DELAY: "delay",
	netlink.NUD_PROBE: "probe", netlink.NUD_FAILED: "failed", netlink.NUD_PERMANENT: "permanent",
}

// reportNeighbors publishes them. The kernel reports each of the many changes; they are read from time to time instead.
func (o *owner) reportNeighbors() error {
	all, err := dump("neighbours", func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	out, links := map[string]Neighbor{}, o.order()
	for _, n := range all {
		address, _ := netip.AddrFromSlice(n.IP)
		name := o.linkName(n.LinkIndex)
		state, shown := neighborStates[n.State]
		if slices.Contains(links, name) && shown && name != "lo" && len(out) < maxNeighbors {
			out[name+"-"+address.Unmap().String()] = Neighbor{name, address.Unmap(), n.HardwareAddr.String(), state}
		}
	}
	return Neighbors.Replace(o.o.Store.As(ID), out)
}
