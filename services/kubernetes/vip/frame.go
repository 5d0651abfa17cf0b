package vip

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
	farthest       = 255 // hop limit: neighbour discovery takes nothing that was forwarded
	solicitation   = 135
	advertisement  = 136
	icmpSize       = 24   // up to the options
	override       = 0x20 // flag of an advertisement: forget what you knew
	optionTarget   = 2    // target link-layer address
	optionNonce    = 14   // RFC 3971 §5.3.2
	optionSize     = 8
	longestReceive = 256 // bytes of a frame that are looked at
)

var (
	everyone = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	nobody   = make(net.HardwareAddr, macSize)
	allNodes = netip.MustParseAddr("ff02::1")
)

// observation is what a frame says about the address.
type observation int

const (
	nothing observation = iota
	// asks: somebody asks everybody whether it is taken (RFC 5227 §2.1.1, RFC 4862
	// §5.4).
	asks
	// checks: somebody asks this machine alone, to know whether it is there.
	checks
	// answers: the kernel of whoever has it says so, also where nothing else of that
	// machine works any more.
	answers
	// announces: a node says on its own that it is its now. Ours do that only while
	// etcd agrees.
	announces
	// confirms is the same, to this machine alone, which has asked: not only the kernel
	// there is alive.
	confirms
)

// question asks who has an address without telling one's own: it changes nobody's
// cache. It goes out as well while another has the address as while it is ours. to is
// the one machine that is asked; nil: all are.
func question(mac, to net.HardwareAddr, target netip.Addr) []byte {
	if target.Is4() {
		if to == nil {
			to = everyone
		}
		return arp(mac, to, arpRequest, netip.IPv4Unspecified(), nobody, target)
	}
	// The multicast group of those whose address ends like that (RFC 4291 §2.7.1).
	group := allNodes.As16()
	group[11], group[12] = 1, 0xff
	end := target.As16()
	copy(group[13:], end[13:])
	frame := icmp6(mac, netip.IPv6Unspecified(), netip.AddrFrom16(group), solicitation, 0, target, nil)
	copy(frame, to)
	return frame
}

// announcements tell everybody on the link that the address is at mac. ARP has two
// forms, as some take only the one and some only the other.
func announcements(mac net.HardwareAddr, address netip.Addr) [][]byte {
	if address.Is4() {
		return [][]byte{
			arp(mac, everyone, arpRequest, address, nobody, address),
			arp(mac, everyone, arpReply, address, mac, address),
		}
	}
	options := append([]byte{optionTarget, 1}, mac...)
	// Kernels answer with advertisements, too. This option, which receivers ignore,
	// tells ours from those.
	options = append(append(options, optionNonce, 1), mac...)
	return [][]byte{icmp6(mac, address, allNodes, advertisement, override, address, options)}
}

// keepalive is an announcement for one machine.
func keepalive(mac, to net.HardwareAddr, address netip.Addr) []byte {
	all := announcements(mac, address)
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

// read is what a frame says about the address, and who says so. Frames come from
// anybody: what isn't exactly as it should be says nothing.
func read(frame []byte, address netip.Addr) (observation, net.HardwareAddr) {
	if len(frame) < ethernetSize {
		return nothing, nil
	}
	kind, body := binary.BigEndian.Uint16(frame[2*macSize:]), frame[ethernetSize:]
	var what observation
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
	case asks:
		return checks, net.HardwareAddr(bytes.Clone(frame[macSize : 2*macSize]))
	case announces:
		return confirms, mac
	}
	return what, mac
}

func readARP(body []byte, address [4]byte) (observation, net.HardwareAddr) {
	if len(body) < arpSize || !bytes.Equal(body[:6], []byte{0, 1, 8, 0, macSize, 4}) {
		return nothing, nil
	}
	mac := net.HardwareAddr(bytes.Clone(body[8:14]))
	sender, target := [4]byte(body[14:18]), [4]byte(body[24:28])
	switch {
	case sender == address && target == address:
		return announces, mac
	case sender == address:
		return answers, mac
	case sender == [4]byte{} && target == address && binary.BigEndian.Uint16(body[6:]) == arpRequest:
		return asks, mac
	}
	return nothing, nil
}

func readICMP6(body []byte, address [16]byte) (observation, net.HardwareAddr) {
	if len(body) < ip6Size+icmpSize || body[6] != nextICMP6 || body[7] != farthest || [16]byte(body[ip6Size+8:]) != address {
		return nothing, nil
	}
	message, unspecified := body[ip6Size:], [16]byte(body[8:24]) == [16]byte{}
	size := int(binary.BigEndian.Uint16(body[4:]))
	if size < icmpSize || size > len(message) {
		return nothing, nil
	}
	var mac net.HardwareAddr
	marked := false
	for options := message[icmpSize:size]; len(options) >= optionSize; {
		length := int(options[1]) * optionSize
		if length == 0 || length > len(options) {
			return nothing, nil
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
		return asks, nobody
	case message[0] == advertisement && mac != nil && marked:
		return announces, mac
	case message[0] == advertisement && mac != nil:
		return answers, mac
	}
	return nothing, nil
}
