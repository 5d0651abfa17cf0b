package qemu

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/network"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

const (
	wireguardLink = "wg0"
	wireguardPort = 51111 // of control planes
	// wireguardKeepalive is how often a node sends a packet, so that answers still reach it.
	wireguardKeepalive = 5 * time.Second
)

// wireguard is the virtual private network of a new cluster: control planes are servers,
// and every node connects to every control plane.
type wireguard struct {
	plan    Plan
	network netip.Prefix
	keys    map[string]wgtypes.Key // private, by node
}

func newWireGuard(p Plan, prefix netip.Prefix) (*wireguard, error) {
	w := &wireguard{plan: p, network: prefix, keys: map[string]wgtypes.Key{}}
	for _, n := range p.Nodes {
		key, err := wgtypes.GeneratePrivateKey()
		if err != nil {
			return nil, fmt.Errorf("key of %s: %w", n.Name, err)
		}
		w.keys[n.Name] = key
	}
	return w, nil
}

// address of the node at an index of the plan. This network has no gateway, so the first
// node has the first address.
func (w *wireguard) address(index int) netip.Addr {
	a := network.Gateway(w.network)
	for range index {
		a = a.Next()
	}
	return a
}

// link is the WireGuard interface of the node at an index.
func (w *wireguard) link(index int) config.Interface {
	own := w.plan.Nodes[index]
	serves := own.Type != string(config.Worker)
	g := &config.WireGuard{PrivateKey: config.Secret(w.keys[own.Name].String())}
	if serves {
		g.ListenPort = wireguardPort
	}
	for i, other := range w.plan.Nodes {
		server := other.Type != string(config.Worker)
		if i == index || !serves && !server {
			continue
		}
		address := w.address(i)
		peer := config.WireGuardPeer{
			PublicKey:  w.keys[other.Name].PublicKey().String(),
			AllowedIPs: []netip.Prefix{netip.PrefixFrom(address, address.BitLen())},
		}
		if server {
			peer.Endpoint = netip.AddrPortFrom(other.Address, wireguardPort).String()
			peer.PersistentKeepalive = wireguardKeepalive
		}
		g.Peers = append(g.Peers, peer)
	}
	return config.Interface{Name: wireguardLink, CIDR: netip.PrefixFrom(w.address(index), w.network.Bits()), WireGuard: g}
}
