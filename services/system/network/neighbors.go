package network

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/socket"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// maxSwitches limits what other hosts can make the node remember for a link, and maxText each text (in bytes).
const maxSwitches, maxText = 8, 64

// lldpPace is the pause after each frame: a neighbour sends one in 30 s.
const lldpPace = 10 * time.Millisecond

// LinkNeighbor is the other end of a cable, mostly the port of a switch. The texts are its own: what isn't printable is
// quoted.
type LinkNeighbor struct {
	Link    string    `yaml:"link" column:"LINK"`
	Chassis string    `yaml:"chassis" column:"CHASSIS"`
	Port    string    `yaml:"port" column:"PORT"`
	System  string    `yaml:"system,omitempty" column:"SYSTEM"`
	VLAN    int       `yaml:"vlan,omitempty" column:"VLAN"` // of the port's frames without a tag; 0: unknown
	Heard   time.Time `yaml:"heard" column:"HEARD"`         // when it last told
	Expires time.Time `yaml:"expires"`                      // when it ends, unless it tells again
}

// LinkNeighbors are what LLDP (IEEE 802.1AB) tells on the cards that networkd configures. Nothing is sent.
var LinkNeighbors = resource.Define[LinkNeighbor](resource.Definition{
	Type: "LinkNeighbors.net.garboard.dev", Kind: "LinkNeighbor", Aliases: []string{"lldp"}, Namespace: "network",
})

// hearLLDP opens the socket, which receives little before a card joins, and receives beside the owner's goroutine.
func (o *owner) hearLLDP(ctx context.Context) error {
	s, err := socket.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(binary.NativeEndian.Uint16([]byte{0x88, 0xcc})), "LLDP", nil)
	if err != nil {
		return err
	}
	o.lldp = s
	o.lookups.Go(func() {
		defer s.Close()
		frame := make([]byte, 1500) // LLDP has no fragments
		for ctx.Err() == nil {
			n, from, _ := s.Recvfrom(ctx, frame, 0) // of some links there are errors at any time
			if at, is := from.(*unix.SockaddrLinklayer); is {
				told := slices.Clone(frame[:n])
				o.tell(ctx, func() bool { o.told(at.Ifindex, told, time.Now()); return false })
			}
			sleep.Until(ctx, nil, lldpPace)
		}
	})
	return nil
}

// join lets a card receive what is sent to the groups of IEEE 802.1AB §7.1; one that refuses has no neighbours.
func (o *owner) join(index int) {
	if o.lldp == nil || o.switches[index] != nil {
		return
	}
	o.switches[index] = map[string]LinkNeighbor{}
	for _, last := range []byte{0x0e, 0x03, 0x00} {
		group := unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_MULTICAST, Alen: 6, Address: [8]byte{0x01, 0x80, 0xc2, 5: last}}
		_ = o.lldp.SetsockoptPacketMreq(unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &group)
	}
}

// told takes a frame over. Other links than cards have neighbours, too: pods.
func (o *owner) told(index int, frame []byte, now time.Time) {
	n, ttl, ok := parseLLDP(frame)
	of := o.switches[index]
	switch _, had := of[n.Chassis]; {
	case !ok || of == nil:
	case ttl == 0:
		delete(of, n.Chassis)
	case had || len(of) < maxSwitches:
		n.Heard, n.Expires = now, now.Add(ttl)
		of[n.Chassis] = n
	}
}

// reportLLDP publishes them, and forgets those that have ended: with their time, their link or its carrier.
func (o *owner) reportLLDP(now time.Time) error {
	all := map[string]LinkNeighbor{}
	for index, of := range o.switches {
		name := o.linkName(index)
		l := o.links[name]
		for chassis, n := range of {
			if l == nil || !carrier(l) || !now.Before(n.Expires) {
				delete(of, chassis)
				continue
			}
			n.Link, n.Heard, n.Expires = name, n.Heard.Round(0), n.Expires.Round(0)
			all[name+"-"+chassis] = n
		}
		if l == nil {
			delete(o.switches, index)
		}
	}
	return LinkNeighbors.Replace(o.o.Store.As(ID), all)
}

// parseLLDP reads a frame without its Ethernet header: TLVs, the first three of which each frame has (IEEE 802.1AB
// clause 8).
func parseLLDP(frame []byte) (n LinkNeighbor, ttl time.Duration, ok bool) {
	for i := byte(1); len(frame) >= 2 && frame[0]>>1 != 0; i = min(i+1, 4) {
		kind, size := frame[0]>>1, int(frame[0]&1)<<8|int(frame[1])
		if frame = frame[2:]; size > len(frame) || min(kind, 4) != i {
			return n, 0, false
		}
		v := frame[:size]
		switch frame = frame[size:]; {
		case kind == 1:
			n.Chassis = lldpID(v, 4)
		case kind == 2:
			n.Port = lldpID(v, 3)
		case kind == 3 && size >= 2:
			ttl, ok = time.Duration(binary.BigEndian.Uint16(v))*time.Second, n.Chassis != "" && n.Port != ""
		case kind == 5:
			n.System = lldpText(v)
		case kind == 127 && size == 6 && strings.HasPrefix(string(v), "\x00\x80\xc2\x01"):
			// IEEE 802.1Q: the port's VLAN
			n.VLAN = int(binary.BigEndian.Uint16(v[4:]))
		}
	}
	return n, ttl, ok
}

// lldpID is the name of a chassis or port after its kind: a MAC address, whose kind is mac, or a text.
func lldpID(v []byte, mac byte) string {
	if len(v) == 7 && v[0] == mac {
		return net.HardwareAddr(v[1:]).String()
	}
	return lldpText(v[min(1, len(v)):])
}

// lldpText is a text of another host, cut, and quoted where it isn't printable.
func lldpText(v []byte) string {
	quoted := strconv.QuoteToASCII(string(v[:min(len(v), maxText)]))
	return quoted[1 : len(quoted)-1]
}

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
		address, name := addrOf(n.IP), o.linkName(n.LinkIndex)
		state, shown := neighborStates[n.State]
		if slices.Contains(links, name) && shown && name != "lo" && len(out) < maxNeighbors {
			out[name+"-"+address.String()] = Neighbor{name, address, n.HardwareAddr.String(), state}
		}
	}
	return Neighbors.Replace(o.o.Store.As(ID), out)
}
