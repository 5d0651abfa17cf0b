package network

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
)

const dhcpBudget = 60 * time.Second // for three tries of each question, of which the client makes the second after 5 s

// Each node gets its own address at each request. Other hardware addresses get none.
func TestDHCP(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a network namespace")
	}
	config := Config{Cluster: "dhcp", Prefix: netip.MustParsePrefix("10.5.0.0/24"), Nodes: []Node{
		{"dhcp-controlplane-1", netip.MustParseAddr("10.5.0.2")},
		{"dhcp-worker-1", netip.MustParseAddr("10.5.0.3")},
	}}
	l, err := New(config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, err := l.ServeDHCP()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, n := range config.Nodes {
		c := dhcpClient(t, l, n)
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(dhcpBudget))
		defer cancel()
		lease, err := c.Request(ctx)
		if err != nil {
			t.Fatalf("%s: %v", n.Name, err)
		}
		a := lease.ACK
		if !a.YourIPAddr.Equal(n.Address.AsSlice()) || !a.Router()[0].Equal(net.IPv4(10, 5, 0, 1)) || a.HostName() != n.Name ||
			a.IPAddressLeaseTime(0) != leaseTime || net.IPMask(a.SubnetMask()).String() != "ffffff00" {
			t.Errorf("%s: %s", n.Name, a.Summary())
		}
		if again, err := c.Renew(ctx, lease); err != nil || !again.ACK.YourIPAddr.Equal(n.Address.AsSlice()) {
			t.Errorf("%s: renewed: %v, %v", n.Name, again, err)
		}
		// The address of another.
		var refused *nclient4.ErrNak
		offer := *lease.Offer
		offer.YourIPAddr = net.IPv4(10, 5, 0, 77)
		if _, err := c.RequestFromOffer(ctx, &offer); !errors.As(err, &refused) {
			t.Errorf("%s: another address: %v", n.Name, err)
		}
	}
	quiet := newLeases(config, slog.New(slog.DiscardHandler))
	unknown, err := dhcpv4.NewDiscovery(net.HardwareAddr{2, 0, 0, 0, 0, 1})
	if err != nil {
		t.Fatal(err)
	}
	if a, err := quiet.answer(unknown); a != nil || err != nil {
		t.Errorf("an unknown hardware address is answered: %v, %v", a, err)
	}
}

// dhcpClient is a client at the node's end of its cable.
func dhcpClient(t *testing.T, l *LAN, n Node) *nclient4.Client {
	t.Helper()
	peer, err := l.Veth(n)
	if err != nil {
		t.Fatal(err)
	}
	link, err := l.links.LinkByName(peer)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.links.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	var c *nclient4.Client
	if err := l.thread.Do(func() (err error) { c, err = nclient4.New(peer); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
