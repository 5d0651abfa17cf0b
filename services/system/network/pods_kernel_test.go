//go:build kernel

package network

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/config"
)

// The links of pods don't count as network cards, also when they are ports of a bridge.
func TestPodLinksAreLeftAlone(t *testing.T) {
	p := newPeer(t)
	var mu sync.Mutex
	cards := map[string]bool{}
	n := startNodeWith(t, t.TempDir(), config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.14.0.2/24")}}},
		func(l netlink.Link) bool {
			mu.Lock()
			defer mu.Unlock()
			is := physicalEthernet(l)
			if is {
				cards[l.Attrs().Name] = true
			}
			return is
		})
	p.wire("pod0", "far1", "10.14.1.1/24")
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}}
	pod, err := netlink.LinkByName("pod0")
	for _, step := range []func() error{
		func() error { return err },
		func() error { return netlink.LinkAdd(bridge) },
		func() error { return netlink.LinkSetUp(bridge) },
		func() error { return netlink.LinkSetUp(pod) },
		func() error { return netlink.LinkSetMaster(pod, bridge) },
		func() error { return netlink.LinkSetNoMaster(pod) },
		func() error { return netlink.LinkSetMaster(pod, bridge) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { netlink.LinkDel(bridge) })
	p.wire("eth0", "far0", "10.14.0.1/24") // events of links come in order: this is the last
	n.up(5 * time.Second)
	mu.Lock()
	defer mu.Unlock()
	if len(cards) > 0 {
		t.Errorf("taken for network cards: %v", cards)
	}
}

// Pods that come and go don't make networkd work.
func TestPodsComeAndGo(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.71.0.1/24")
	var looks atomic.Int64
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.list = func() ([]netlink.Link, error) {
			looks.Add(1)
			return dump("links", netlink.LinkList)
		}
	}
	n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.71.0.2/24", 0)}})
	n.run(cards)
	n.up(5 * time.Second)
	ip(t, "link", "add", "cni0", "type", "bridge")
	t.Cleanup(func() { ip(t, "link", "del", "cni0") })
	before := looks.Load()
	for range 6 {
		ip(t, "link", "add", "pod0", "type", "veth", "peer", "name", "pod1")
		ip(t, "link", "set", "pod0", "up", "master", "cni0")
		ip(t, "link", "set", "pod1", "up")
		ip(t, "link", "del", "pod0")
	}
	ip(t, "address", "del", "10.71.0.2/24", "dev", "eth0") // events come in order: this is the last
	becomes(t, "eth0", "10.71.0.2/24")
	if got := looks.Load() - before; got > 6 {
		t.Errorf("networkd has looked %d times at the links while 6 pods came and went", got)
	}
}
