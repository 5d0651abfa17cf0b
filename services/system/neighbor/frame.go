// Package neighbor sends and receives what machines on one link say about one
// address: probes, answers and announcements of ARP (RFC 826, RFC 5227) and
// neighbour discovery (RFC 4861). A packet socket gets them before the kernel
// acts on them, and a filter in the kernel selects the few frames about the
// address, so that other traffic doesn't wake PID 1.
package neighbor

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
)

// Sizes and numbers of the frames below: Ethernet (IEEE 802.3), ARP (RFC 826),
// IPv6 (RFC 8200) and neighbour discovery (RFC 4861).
const (
	macSize      = 6
	ethernetSize = 2*macSize + 2
	shortest     = 60 // of an Ethernet frame, without its check sum
	typeARP      = 0x0806
	typeIPv4     = 0x0800
	typeIPv6     = 0x86dd

	arpSize    = 28
	arpRequest = 1
	arpReply   = 2

	ip6Size        = 40
	nextICMP6      = 58
	farthest       = 255 // hop limit: receivers of neighbour discovery ignore forwarded packets
	solicitation   = 135
	advertisement  = 136
	icmpSize       = 24   // up to the options
	override       = 0x20 // flag of an advertisement: replace the cache entry
	optionTarget   = 2    // target link-layer address
	optionNonce    = 14   // RFC 3971 §5.3.2
	optionSize     = 8
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
	// The multicast group of all addresses with this ending (RFC 4291 §2.7.1).
	group := allNodes.As16()
	group[11], group[12] = 1, 0xff
	end := target.As16()
	copy(group[13:], end[13:])
	frame := icmp6(mac, netip.IPv6Unspecified(), netip.AddrFrom16(group), solicitation, 0, target, nil)
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
	options := append([]byte{optionTarget, 1}, mac...)
	// Kernels answer with advertisements, too. This option, which receivers ignore, marks
	// ours.
	options = append(append(options, optionNonce, 1), mac...)
	return [][]byte{icmp6(mac, address, allNodes, advertisement, override, address, options)}
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
	f := ethernet(mac, to, typeARP)
	f = binary.BigEndian.AppendUint16(f, 1) // Ethernet
	f = binary.BigEndian.AppendUint16(f, typeIPv4)
	f = append(f, macSize, 4)
	f = binary.BigEndian.AppendUint16(f, operation)
	f = append(append(f, mac...), sender.AsSlice()...)
	f = append(append(f, targetMAC...), target.AsSlice()...)
	return append(f, make([]byte, shortest-len(f))...)
}

func icmp6(mac net.HardwareAddr, from, to netip.Addr, kind, flags byte, target netip.Addr, options []byte) []byte {
	group := to.As16()
	multicast := net.HardwareAddr{0x33, 0x33, group[12], group[13], group[14], group[15]} // RFC 2464 §7
	f := ethernet(mac, multicast, typeIPv6)
	size := icmpSize + len(options)
	f = append(f, 0x60, 0, 0, 0) // version 6
	f = binary.BigEndian.AppendUint16(f, uint16(size))
	f = append(f, nextICMP6, farthest)
	f = append(append(f, from.AsSlice()...), to.AsSlice()...)
	f = append(f, kind, 0, 0, 0, flags, 0, 0, 0)
	f = append(append(f, target.AsSlice()...), options...)
	ip := f[ethernetSize:]
	binary.BigEndian.PutUint16(ip[ip6Size+2:], checksum(ip))
	return f
}

// checksum is ICMPv6's, over the message and the pseudo-header (RFC 8200 §8.1).
func checksum(ip []byte) uint16 {
	sum := uint32(len(ip)-ip6Size) + nextICMP6
	for i := 8; i+1 < len(ip); i += 2 { // addresses and message; ours have an even size
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
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
	case address.Is4() && kind == typeARP:
		what, mac = readARP(body, address.As4())
	case address.Is6() && kind == typeIPv6:
		what, mac = readICMP6(body, address.As16())
	}
	if toAll := frame[0]&1 == 1; toAll {
		return what, mac
	}
	switch what {
	case Probe:
		return DirectProbe, net.HardwareAddr(bytes.Clone(frame[macSize : 2*macSize]))
	case Announcement:
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

func readICMP6(body []byte, address [16]byte) (Observation, net.HardwareAddr) {
	if len(body) < ip6Size+icmpSize || body[6] != nextICMP6 || body[7] != farthest || [16]byte(body[ip6Size+8:]) != address {
		return Nothing, nil
	}
	message, unspecified := body[ip6Size:], [16]byte(body[8:24]) == [16]byte{}
	size := int(binary.BigEndian.Uint16(body[4:]))
	if size < icmpSize || size > len(message) {
		return Nothing, nil
	}
	var mac net.HardwareAddr
	marked := false
	for options := message[icmpSize:size]; len(options) >= optionSize; {
		length := int(options[1]) * optionSize
		if length == 0 || length > len(options) {
			return Nothing, nil
		}
		switch options[0] {
		case optionTarget:
			mac = net.HardwareAddr(bytes.Clone(options[2:optionSize]))
		case optionNonce:
			marked = true
		}
		options = options[length:]
	}
	switch {
	case message[0] == solicitation && unspecified:
		return Probe, zeroMAC
	case message[0] == advertisement && mac != nil && marked:
		return Announcement, mac
	case message[0] == advertisement && mac != nil:
		return Reply, mac
	}
	return Nothing, nil
}
