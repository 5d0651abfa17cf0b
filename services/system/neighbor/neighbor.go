// Package neighbor sends and receives what machines on one link say about one
// address: probes, answers and announcements of ARP (RFC 826, RFC 5227) and
// neighbour discovery (RFC 4861). A packet socket gets them before the kernel
// acts on them, and a filter in the kernel selects the few frames about the
// address, so that other traffic doesn't wake PID 1.
package neighbor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/services/core/dag"
)

// Sizes and numbers of the frames below: Ethernet (IEEE 802.3), ARP (RFC 826),
// IPv6 (RFC 8200) and neighbour discovery (RFC 4861).
const (
	macSize      = 6
	ethernetSize = 2*macSize + 2
	shortest     = 60 // of an Ethernet frame, without its check sum

	arpSize    = 28
	arpRequest = 1
	arpReply   = 2

	farthest       = 255 // hop limit: receivers of neighbour discovery ignore forwarded packets
	optionNonce    = 14  // RFC 3971 §5.3.2
	longestReceive = 256 // bytes of a frame that are read
)

var (
	broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	zeroMAC   = make(net.HardwareAddr, macSize)
	allNodes  = netip.MustParseAddr("ff02::1")
)

// Observation is the meaning of a frame for the address.
type Observation int

const (
	Nothing Observation = iota
	// Probe: a probe of the address, sent to all (RFC 5227 §2.1.1, RFC 4862 §5.4).
	Probe
	// DirectProbe: a probe sent to this machine alone, to check whether it is there.
	DirectProbe
	// Reply: the answer of the kernel of a machine that has the address, also if
	// nothing else of that machine works any more.
	Reply
	// Announcement: a machine announces, unasked, that it has the address. Our
	// nodes do that only while etcd agrees.
	Announcement
	// Keepalive: an announcement to this machine alone, after its probe. So more
	// than the kernel of that machine works.
	Keepalive
)

// ProbeFrame asks for the owner of an address without the sender's own address: it
// changes no neighbour cache. It can be sent while another machine has the address, and
// while this one has it. to is the only receiver; nil: all machines on the link.
func ProbeFrame(mac, to net.HardwareAddr, target netip.Addr) []byte {
	if target.Is4() {
		if to == nil {
			to = broadcast
		}
		return arp(mac, to, arpRequest, netip.IPv4Unspecified(), zeroMAC, target)
	}
	group, _ := ndp.SolicitedNodeMulticast(target) // of any IPv6 address
	frame := icmp6(mac, netip.IPv6Unspecified(), group, &ndp.NeighborSolicitation{TargetAddress: target})
	copy(frame, to)
	return frame
}

// Announcements announce to all machines on the link that the address is at
// mac. ARP has two forms, because some machines accept only one of them.
func Announcements(mac net.HardwareAddr, address netip.Addr) [][]byte {
	if address.Is4() {
		return [][]byte{
			arp(mac, broadcast, arpRequest, address, zeroMAC, address),
			arp(mac, broadcast, arpReply, address, mac, address),
		}
	}
	return [][]byte{icmp6(mac, address, allNodes, &ndp.NeighborAdvertisement{Override: true, TargetAddress: address, Options: []ndp.Option{
		&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: mac},
		// Kernels answer with advertisements, too. This option, which receivers ignore, marks
		// ours.
		&ndp.RawOption{Type: optionNonce, Length: 1, Value: mac},
	}})}
}

// KeepaliveFrame is an announcement to one machine.
func KeepaliveFrame(mac, to net.HardwareAddr, address netip.Addr) []byte {
	all := Announcements(mac, address)
	frame := all[len(all)-1] // ARP's reply
	copy(frame, to)
	return frame
}

func ethernet(from, to net.HardwareAddr, kind uint16) []byte {
	frame := make([]byte, 0, shortest+macSize)
	frame = append(append(frame, to...), from...)
	return binary.BigEndian.AppendUint16(frame, kind)
}

func arp(mac, to net.HardwareAddr, operation uint16, sender netip.Addr, targetMAC net.HardwareAddr, target netip.Addr) []byte {
	f := ethernet(mac, to, unix.ETH_P_ARP)
	f = binary.BigEndian.AppendUint16(f, 1) // Ethernet
	f = binary.BigEndian.AppendUint16(f, unix.ETH_P_IP)
	f = append(f, macSize, 4)
	f = binary.BigEndian.AppendUint16(f, operation)
	f = append(append(f, mac...), sender.AsSlice()...)
	f = append(append(f, targetMAC...), target.AsSlice()...)
	return append(f, make([]byte, shortest-len(f))...)
}

func icmp6(mac net.HardwareAddr, from, to netip.Addr, m ndp.Message) []byte {
	group := to.As16()
	multicast := net.HardwareAddr{0x33, 0x33, group[12], group[13], group[14], group[15]} // RFC 2464 §7
	message, _ := ndp.MarshalMessageChecksum(m, from, to)                                 // ours can be written
	f := ethernet(mac, multicast, unix.ETH_P_IPV6)
	f = append(f, 0x60, 0, 0, 0) // version 6
	f = binary.BigEndian.AppendUint16(f, uint16(len(message)))
	f = append(f, unix.IPPROTO_ICMPV6, farthest)
	return slices.Concat(f, from.AsSlice(), to.AsSlice(), message)
}

// read returns what a frame means for the address, and the MAC address of its sender.
// Any machine may send frames: those that aren't exactly as expected are ignored.
func read(frame []byte, address netip.Addr) (Observation, net.HardwareAddr) {
	if len(frame) < ethernetSize {
		return Nothing, nil
	}
	kind, body := binary.BigEndian.Uint16(frame[2*macSize:]), frame[ethernetSize:]
	var what Observation
	var mac net.HardwareAddr
	switch {
	case address.Is4() && kind == unix.ETH_P_ARP:
		what, mac = readARP(body, address.As4())
	case address.Is6() && kind == unix.ETH_P_IPV6:
		what, mac = readICMP6(body, address)
	}
	switch toAll := frame[0]&1 == 1; {
	case toAll:
	case what == Probe:
		return DirectProbe, net.HardwareAddr(bytes.Clone(frame[macSize : 2*macSize]))
	case what == Announcement:
		return Keepalive, mac
	}
	return what, mac
}

func readARP(body []byte, address [4]byte) (Observation, net.HardwareAddr) {
	if len(body) < arpSize || !bytes.Equal(body[:6], []byte{0, 1, 8, 0, macSize, 4}) {
		return Nothing, nil
	}
	mac := net.HardwareAddr(bytes.Clone(body[8:14]))
	sender, target := [4]byte(body[14:18]), [4]byte(body[24:28])
	switch {
	case sender == address && target == address:
		return Announcement, mac
	case sender == address:
		return Reply, mac
	case sender == [4]byte{} && target == address && binary.BigEndian.Uint16(body[6:]) == arpRequest:
		return Probe, mac
	}
	return Nothing, nil
}

func readICMP6(body []byte, address netip.Addr) (Observation, net.HardwareAddr) {
	h, err := ipv6.ParseHeader(body)
	if err != nil || h.NextHeader != unix.IPPROTO_ICMPV6 || h.HopLimit != farthest || ipv6.HeaderLen+h.PayloadLen > len(body) {
		return Nothing, nil
	}
	m, err := ndp.ParseMessage(body[ipv6.HeaderLen:][:h.PayloadLen])
	if err != nil {
		return Nothing, nil
	}
	switch m := m.(type) {
	case *ndp.NeighborSolicitation:
		if m.TargetAddress == address && h.Src.IsUnspecified() {
			return Probe, zeroMAC
		}
	case *ndp.NeighborAdvertisement:
		i := slices.IndexFunc(m.Options, func(o ndp.Option) bool { a, is := o.(*ndp.LinkLayerAddress); return is && a.Direction == ndp.Target })
		switch {
		case m.TargetAddress != address || i < 0:
		case slices.ContainsFunc(m.Options, func(o ndp.Option) bool { return o.Code() == optionNonce }):
			return Announcement, m.Options[i].(*ndp.LinkLayerAddress).Addr
		default:
			return Reply, m.Options[i].(*ndp.LinkLayerAddress).Addr
		}
	}
	return Nothing, nil
}

// Observed is a frame of another machine about the address.
type Observed struct {
	What Observation
	MAC  net.HardwareAddr
}

// Wire is a packet socket on a link that receives frames about one address.
type Wire struct {
	Index   int
	MAC     net.HardwareAddr
	address netip.Addr
	conn    *packet.Conn
	Dead    chan struct{} // closed when it stops receiving
}

// On reports whether the kernel finds neighbours on a link by ARP and ND.
func On(l netlink.Link) bool {
	return len(l.Attrs().HardwareAddr) == macSize && l.Attrs().RawFlags&(unix.IFF_NOARP|unix.IFF_LOOPBACK) == 0
}

// Open listens on a link until close, or until the link is removed. receive must not
// block.
func Open(l netlink.Link, address netip.Addr, log *slog.Logger, receive func(Observed)) (_ *Wire, err error) {
	a := l.Attrs()
	if !On(l) {
		return nil, fmt.Errorf("%s is no Ethernet link: it has no neighbours by MAC address", a.Name)
	}
	protocol := map[bool]int{true: unix.ETH_P_ARP, false: unix.ETH_P_IPV6}[address.Is4()]
	conn, err := packet.Listen(&net.Interface{Index: a.Index}, packet.Raw, protocol, &packet.Config{Filter: filter(address)})
	if err != nil {
		return nil, fmt.Errorf("listen to %s: %w", a.Name, err)
	}
	w := &Wire{Index: a.Index, MAC: a.HardwareAddr, address: address, conn: conn, Dead: make(chan struct{})}
	go func() {
		defer close(w.Dead)
		// Guard: any machine may send frames. After a panic the controller opens another wire.
		_ = dag.Guard(log, func() error { w.listen(receive); return nil })
	}()
	return w, nil
}

func (w *Wire) listen(receive func(Observed)) {
	frame := make([]byte, longestReceive)
	for {
		n, _, err := w.conn.ReadFrom(frame)
		if err != nil {
			return
		}
		if what, mac := read(frame[:n], w.address); what != Nothing && mac.String() != w.MAC.String() {
			receive(Observed{what, mac})
		}
	}
}

func (w *Wire) Close() error {
	err := w.conn.Close()
	<-w.Dead
	return err
}

func (w *Wire) Send(frames ...[]byte) error {
	var errs []error
	for _, f := range frames {
		_, err := w.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:macSize]})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// filter lets the kernel select the few needed frames, so that other traffic on the
// link doesn't wake PID 1. Offsets are from the start of the frame. Of an IPv6 address, the end is enough.
func filter(address netip.Addr) []bpf.RawInstruction {
	const message = ethernetSize + ipv6.HeaderLen
	own := address.AsSlice()
	last := binary.BigEndian.Uint32(own[len(own)-4:])
	// sender, target
	program := []bpf.Instruction{load(4, ethernetSize+14), equal(last, 2, 0), load(4, ethernetSize+24), equal(last, 0, 1)}
	if address.Is6() {
		program = []bpf.Instruction{load(1, ethernetSize+6), equal(unix.IPPROTO_ICMPV6, 0, 6),
			load(1, message), equal(uint32(ipv6.ICMPTypeNeighborSolicitation), 1, 0), equal(uint32(ipv6.ICMPTypeNeighborAdvertisement), 0, 3),
			load(4, message+8+12), equal(last, 0, 1)}
	}
	// all can be written
	raw, _ := bpf.Assemble(append(program, bpf.RetConstant{Val: longestReceive}, bpf.RetConstant{}))
	return raw
}

func load(size int, offset uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: offset, Size: size} }

// equal skips that many instructions if the loaded value is k, or isn't.
func equal(k uint32, yes, no uint8) bpf.Instruction {
	return bpf.JumpIf{Cond: bpf.JumpEqual, Val: k, SkipTrue: yes, SkipFalse: no}
}
