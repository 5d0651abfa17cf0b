package main

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/net/bpf"
)

// packetOf is an Ethernet frame.
func packetOf(from, to string, protocol byte, source, destination, offset uint16) []byte {
	a, b := netip.MustParseAddr(from), netip.MustParseAddr(to)
	f := make([]byte, 12)
	if a.Is4() {
		f = binary.BigEndian.AppendUint16(f, typeIPv4)
		f = append(f, 0x46, 0, 0, 0, 0, 0) // with an option of 4 bytes
		f = append(binary.BigEndian.AppendUint16(f, offset), 64, protocol, 0, 0)
		f = append(append(append(f, a.AsSlice()...), b.AsSlice()...), 1, 1, 1, 0)
	} else {
		f = binary.BigEndian.AppendUint16(f, typeIPv6)
		f = append(f, 0x60, 0, 0, 0, 0, 8, protocol, 64)
		f = append(append(f, a.AsSlice()...), b.AsSlice()...)
	}
	f = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(f, source), destination)
	return append(f, 0, 0, 0, 0)
}

// The filter passes what is asked for, and nothing else.
func TestPacketFilter(t *testing.T) {
	t.Parallel()
	host4, host6 := netip.MustParseAddr("10.5.0.1"), netip.MustParseAddr("2001:db8::1")
	four := func(from, to string, ports ...uint16) []byte {
		return packetOf(from, to, protocolTCP, ports[0], ports[1], 0)
	}
	arp := binary.BigEndian.AppendUint16(make([]byte, 12), 0x0806)
	arp = append(arp, make([]byte, 46)...)
	type options struct {
		host         netip.Addr
		port, except uint16
	}
	for name, c := range map[string]struct {
		options
		packet []byte
		pass   bool
	}{
		"anything":                        {options{netip.Addr{}, 0, 0}, arp, true},
		"anything but":                    {options{netip.Addr{}, 0, 50000}, arp, true},
		"but, from":                       {options{netip.Addr{}, 0, 50000}, four("10.5.0.1", "10.5.0.2", 50000, 7), false},
		"but, to, IPv6":                   {options{netip.Addr{}, 0, 50000}, four("fd00::1", "fd00::2", 7, 50000), false},
		"but another port":                {options{netip.Addr{}, 0, 50000}, four("fd00::1", "fd00::2", 7, 8), true},
		"from the host":                   {options{host4, 0, 0}, four("10.5.0.1", "10.5.0.2", 1, 2), true},
		"to the host":                     {options{host4, 0, 0}, four("10.5.0.2", "10.5.0.1", 1, 2), true},
		"another host":                    {options{host4, 0, 0}, four("10.5.0.2", "10.5.0.3", 1, 2), false},
		"from the host, its API":          {options{host4, 0, 50000}, four("10.5.0.1", "10.5.0.2", 1, 50000), false},
		"host, another version":           {options{host4, 0, 0}, four("fd00::1", "fd00::2", 1, 2), false},
		"from the host, IPv6":             {options{host6, 0, 0}, four("2001:db8::1", "2001:db8::2", 1, 2), true},
		"to the host, IPv6":               {options{host6, 0, 0}, four("2001:db8::2", "2001:db8::1", 1, 2), true},
		"half of each, IPv6":              {options{host6, 0, 0}, four("2001:db8::2", "2001:db9::1", 1, 2), false},
		"from the port":                   {options{netip.Addr{}, 53, 0}, four("10.5.0.1", "10.5.0.2", 53, 2), true},
		"to the port, UDP":                {options{netip.Addr{}, 53, 0}, packetOf("10.5.0.1", "10.5.0.2", protocolUDP, 1, 53, 0), true},
		"to the port, IPv6":               {options{netip.Addr{}, 53, 0}, packetOf("fd00::1", "fd00::2", protocolUDP, 1, 53, 0), true},
		"another port":                    {options{netip.Addr{}, 53, 0}, four("10.5.0.1", "10.5.0.2", 1, 54), false},
		"a protocol without ports":        {options{netip.Addr{}, 53, 0}, packetOf("10.5.0.1", "10.5.0.2", 1, 53, 53, 0), false},
		"a later fragment":                {options{netip.Addr{}, 53, 0}, packetOf("10.5.0.1", "10.5.0.2", protocolUDP, 53, 53, 0x2010), false},
		"a first fragment":                {options{netip.Addr{}, 53, 0}, packetOf("10.5.0.1", "10.5.0.2", protocolUDP, 53, 53, 0x2000), true},
		"host and port":                   {options{host4, 53, 0}, four("10.5.0.2", "10.5.0.1", 1, 53), true},
		"host and another port":           {options{host4, 53, 0}, four("10.5.0.2", "10.5.0.1", 1, 54), false},
		"another host and the port":       {options{host4, 53, 0}, four("10.5.0.2", "10.5.0.3", 1, 53), false},
		"IPv6: host and port":             {options{host6, 53, 0}, four("2001:db8::2", "2001:db8::1", 1, 53), true},
		"IPv6: host and another port":     {options{host6, 53, 0}, four("2001:db8::1", "2001:db8::3", 1, 54), false},
		"no packet, with a host":          {options{host4, 0, 0}, arp, false},
		"cut off, with a host and a port": {options{host4, 53, 0}, four("10.5.0.2", "10.5.0.1", 1, 53)[:36], false},
	} {
		program, err := packetFilter(c.host, c.port, c.except)
		if err != nil {
			t.Fatal(err)
		}
		raw := make([]bpf.RawInstruction, len(program))
		for i, p := range program {
			raw[i] = bpf.RawInstruction{Op: uint16(p >> 48), Jt: uint8(p >> 40), Jf: uint8(p >> 32), K: uint32(p)}
		}
		instructions, all := bpf.Disassemble(raw)
		if !all {
			t.Fatalf("%s: the program has unknown instructions", name)
		}
		vm, err := bpf.NewVM(instructions)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := vm.Run(c.packet); err != nil || n > 0 != c.pass {
			t.Errorf("%s: it passes %d bytes (%v), want %v", name, n, err, c.pass)
		}
	}
}
