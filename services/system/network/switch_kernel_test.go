//go:build kernel

package network

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// reaches waits until the peer gets an answer of an address, or checks that it gets none.
func (p *peer) reaches(address string, want bool) {
	p.t.Helper()
	p.do(func() {
		try := func() error {
			c, err := reach(address, time.Second)
			if err == nil {
				c.Close()
			}
			return err
		}
		if want {
			eventually.That(p.t, 10*time.Second, address+" answers", try)
		} else if try() == nil {
			p.t.Errorf("%s answers", address)
		}
	})
}

// A bridge that filters forwards a tagged packet only in the VLANs on top of it, and one that doesn't filter forwards
// all. What has no tag goes in both cases.
func TestBridgeForwardsItsVLANs(t *testing.T) {
	var peers []*peer
	for i := range 2 {
		p := newPeer(t)
		p.wire(fmt.Sprintf("eth%d", i), far, fmt.Sprintf("10.32.0.1%d/24", i))
		p.tagged(7, fmt.Sprintf("10.32.7.1%d/24", i))
		p.tagged(8, fmt.Sprintf("10.32.8.1%d/24", i))
		peers = append(peers, p)
	}
	peers[0].echo()
	settings := func(filter bool) config.Network {
		return config.Network{Interfaces: []config.Interface{{Name: "br0", CIDR: prefix("10.32.0.2/24"), VLANs: []config.VLAN{{ID: 7, CIDR: prefix("10.32.7.2/24")}},
			Bridge: &config.Bridge{Interfaces: []string{"eth0", "eth1"}, VLAN: config.BridgeVLAN{VLANFiltering: filter}}}}}
	}
	n := startNode(t, settings(true))
	n.up(20 * time.Second)
	peers[1].reaches("10.32.0.10", true)
	peers[1].reaches("10.32.7.10", true)
	peers[1].reaches("10.32.8.10", false)
	connect(t, "10.32.7.10") // the node is in the VLAN, too
	n.configure(settings(false))
	peers[1].reaches("10.32.8.10", true)
	n.configure(settings(true))
	shows(t, "vlan_filtering 1", "-d", "link", "show", "dev", "br0")
	tags(t, "eth1", 1, 7)
	peers[1].reaches("10.32.8.10", false)
	peers[1].reaches("10.32.7.10", true)
	n.follows()
}

// With STP, one of two cables between the same switches is blocked, and takes over when the other one fails.
func TestBridgeBlocksACircle(t *testing.T) {
	p := newPeer(t)
	p.do(func() {
		ip(t, "link", "add", far, "type", "bridge", "stp_state", "1", "priority", "4096", "forward_delay", "200", "hello_time", "100", "max_age", "600")
	})
	for _, node := range []string{"eth0", "eth1"} {
		p.cable(node, "far-"+node)
		p.do(func() { ip(t, "link", "set", "far-"+node, "master", far); linkUp(t, "far-"+node) })
	}
	p.do(func() { p.address(far, "10.33.0.1/24"); linkUp(t, far) })
	p.echo()
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "br0", CIDR: prefix("10.33.0.2/24"),
		Bridge: &config.Bridge{Interfaces: []string{"eth0", "eth1"}, STP: config.BridgeSTP{Enabled: true}}}}})
	n.up(20 * time.Second)
	// BR_STATE_ of the kernel
	const forwarding, blocking = "3", "4"
	ports := func(want ...string) {
		t.Helper()
		eventually.That(t, 80*time.Second, fmt.Sprintf("the ports are %q", want), func() error {
			for i, state := range want {
				text, err := os.ReadFile(fmt.Sprintf("/sys/class/net/eth%d/brport/state", i))
				if got := strings.TrimSpace(string(text)); err != nil || got != state {
					return fmt.Errorf("eth%d is %q (%v)", i, got, err)
				}
			}
			return nil
		})
	}
	ports(forwarding, blocking)
	traffic := connect(t, "10.33.0.1")
	p.plug("eth0", false)
	eventually.That(t, 80*time.Second, "the other port takes over", func() error {
		text, err := os.ReadFile("/sys/class/net/eth1/brport/state")
		if got := strings.TrimSpace(string(text)); err == nil && got != forwarding {
			err = fmt.Errorf("it is %q", got)
		}
		return err
	})
	goesOn(t, traffic)
	n.follows()
}

// A VRF has routes of its own: the same network is another one there, and only who binds a socket to it is in it.
func TestVRFIsApart(t *testing.T) {
	here, there := newPeer(t), newPeer(t)
	here.wire("eth0", "far0", "10.34.0.1/24")
	there.wire("eth1", "far1", "10.34.0.1/24")
	there.echo()
	there.do(func() { there.address("lo", "198.51.100.9/32") })
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		static("eth0", "10.34.0.2/24", 0), {Name: "blue", VRF: &config.VRF{Table: 1000, Interfaces: []string{"eth1"}}},
		static("eth1", "10.34.0.3/24", 0, config.DefaultRoute(addr("10.34.0.1"))),
	}})
	n.up(20 * time.Second)
	memberOf(t, "eth1", "blue")
	bound := net.Dialer{Timeout: time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
		if failed := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "blue") }); failed != nil {
			return failed
		}
		return err
	}}
	for _, address := range []string{"10.34.0.1", "198.51.100.9"} {
		eventually.That(t, 10*time.Second, address+" answers in the VRF", func() error {
			c, err := bound.DialContext(context.Background(), "tcp", net.JoinHostPort(address, echoPort))
			if err == nil {
				err = echo(c, time.Second)
				c.Close()
			}
			return err
		})
		if c, err := reach(address, time.Second); err == nil {
			c.Close()
			t.Errorf("%s answers outside of the VRF", address)
		}
	}
	if out, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 1000, Protocol: ours}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL); err != nil || len(out) != 1 {
		t.Errorf("routes of the VRF: %v (%v)", out, err)
	}
	n.follows()
}
