package network

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// A server with many options puts some into the fields for names (option 52, RFC 2131 §4.1), also parts of one (RFC
// 3396).
func TestOptionsInTheFieldsForNames(t *testing.T) {
	t.Parallel()
	ack, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeAck), dhcpv4.WithYourIP(net.IPv4(10, 0, 0, 5)), dhcpv4.WithLeaseTime(600),
		dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 0, 0, 1))),
		dhcpv4.WithOption(dhcpv4.OptDNS(net.IPv4(10, 0, 0, 53))))
	if err != nil {
		t.Fatal(err)
	}
	file := []byte{6, 4, 10, 0, 0, 54, 0, 3, 4, 10, 0, 0, 0, 255} // a name server, and a router that can't be
	name := append([]byte{6, 4, 10, 0, 0, 55, 15, 11}, "example.org\xff"...)
	for _, tt := range []struct {
		in      byte
		file    []byte
		servers string
		search  []string
	}{
		{0, file, "[10.0.0.53]", nil},
		{1, file, "[10.0.0.53 10.0.0.54]", nil},
		{2, file, "[10.0.0.53 10.0.0.55]", []string{"example.org"}},
		{3, file, "[10.0.0.53 10.0.0.54 10.0.0.55]", []string{"example.org"}},
		{3, []byte{6, 200, 1}, "[10.0.0.53]", nil}, // broken: none of them
	} {
		ack.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionOptionOverload, []byte{tt.in}))
		packet := make([]byte, 1500)
		n := copy(packet, ack.ToBytes())
		copy(packet[44:108], name)
		clear(packet[108:236])
		copy(packet[108:236], tt.file)
		m, err := dhcpv4.FromBytes(packet[:unfold(packet, n)])
		if err != nil {
			t.Fatal(err)
		}
		l, err := newLease(m, time.Now())
		if err != nil || fmt.Sprint(l.Resolvers) != tt.servers || !slices.Equal(l.Search, tt.search) {
			t.Errorf("%d: %+v (%v)", tt.in, l, err)
		}
	}
}
