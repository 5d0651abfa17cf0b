package main

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/net/bpf"
)

// Numbers in packets: of IEEE 802.3, RFC 791, RFC 8200 and RFC 9293, as are the places below.
const (
	typeIPv4, typeIPv6     = 0x0800, 0x86dd
	protocolTCP            = 6
	protocolUDP            = 17
	ethernetHead, ipv6Head = 14, 40
	fragmentBits           = 0x1fff // the offset in a fragment of IPv4: only the first one has ports
	longestPacket          = 256 << 10
)

// packetFilter is a program for the kernel of a node. It passes Ethernet packets of the host and the port, and none of
// the port except. What isn't given is any.
func packetFilter(host netip.Addr, port, except uint16) ([]uint64, error) {
	var drop, pass []bpf.Instruction
	selects := host.IsValid() || port != 0
	for _, protocol := range []uint32{protocolTCP, protocolUDP} {
		for side := range uint32(4) { // source or destination has the host, and the port
			for _, six := range []bool{false, true} {
				if except != 0 {
					drop = append(drop, packetRule(six, netip.Addr{}, except, protocol, side, 0)...)
				}
				if selects && (!host.IsValid() || host.Is6() == six) {
					pass = append(pass, packetRule(six, host, port, protocol, side, longestPacket)...)
				}
			}
		}
	}
	result := bpf.RetConstant{}
	if !selects {
		result.Val = longestPacket
	}
	program, err := bpf.Assemble(slices.Concat(drop, pass, []bpf.Instruction{result}))
	out := make([]uint64, len(program))
	for i, p := range program {
		out[i] = uint64(p.Op)<<48 | uint64(p.Jt)<<40 | uint64(p.Jf)<<32 | uint64(p.K)
	}
	return out, err
}

// packetRule ends with a result for packets of one version of IP from or to a host and a port.
func packetRule(six bool, host netip.Addr, port uint16, protocol, side, result uint32) []bpf.Instruction {
	kind, next, source, size := uint32(typeIPv4), uint32(ethernetHead+9), uint32(ethernetHead+12), uint32(4)
	if six {
		kind, next, source, size = typeIPv6, ethernetHead+6, ethernetHead+8, 16
	}
	b := []bpf.Instruction{bpf.RetConstant{Val: result}}
	// From the last test to the first: one that fails skips all that is there.
	test := func(want uint32, load ...bpf.Instruction) {
		b = slices.Concat(load, []bpf.Instruction{bpf.JumpIf{Val: want, SkipFalse: uint8(len(b))}}, b)
	}
	if port != 0 {
		at := ethernetHead + side/2*2
		if six {
			test(uint32(port), bpf.LoadAbsolute{Off: at + ipv6Head, Size: 2})
		} else {
			test(uint32(port), bpf.LoadMemShift{Off: ethernetHead}, bpf.LoadIndirect{Off: at, Size: 2})
			test(0, bpf.LoadAbsolute{Off: ethernetHead + 6, Size: 2}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: fragmentBits})
		}
		test(protocol, bpf.LoadAbsolute{Off: next, Size: 1})
	}
	address := host.AsSlice()
	for i := 0; i < len(address); i += 4 {
		test(binary.BigEndian.Uint32(address[i:]), bpf.LoadAbsolute{Off: source + side%2*size + uint32(i), Size: 4})
	}
	test(kind, bpf.LoadAbsolute{Off: 12, Size: 2})
	return b
}
