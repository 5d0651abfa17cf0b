package network

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// observeEvery is how often the kernel is asked for the state of WireGuard links: it reports no
// changes by itself. At each keepalive of 5 s the counters change.
const observeEvery = 5 * time.Second

// silentAfter is when a session without a new handshake has ended (REJECT_AFTER_TIME of WireGuard).
const silentAfter = 3 * time.Minute

// WireGuardStatus is the state of a WireGuard link in the kernel, as `wg show` prints it. The
// private key and preshared ones aren't part of it.
type WireGuardStatus struct {
	PublicKey    string                `yaml:"publicKey,omitempty" column:"PUBLIC KEY"`
	ListenPort   int                   `yaml:"listenPort,omitempty" column:"PORT"`
	FirewallMark int                   `yaml:"firewallMark,omitempty"`                              // of the packets that it sends
	Latest       time.Time             `yaml:"latestHandshake,omitempty" column:"LATEST HANDSHAKE"` // of all peers
	Peers        []WireGuardPeerStatus `yaml:"peers,omitempty"`
	Problem      string                `yaml:"problem,omitempty" column:"PROBLEM"` // why the kernel's state is unknown
}

// WireGuardPeerStatus is the state of one peer.
type WireGuardPeerStatus struct {
	PublicKey           string         `yaml:"publicKey"`
	Endpoint            string         `yaml:"endpoint,omitempty"` // the address of its last packet
	AllowedIPs          []netip.Prefix `yaml:"allowedIPs"`
	LatestHandshake     time.Time      `yaml:"latestHandshake,omitempty"` // zero: none yet
	Received            int64          `yaml:"received"`                  // bytes
	Sent                int64          `yaml:"sent"`                      // bytes
	PersistentKeepalive time.Duration  `yaml:"persistentKeepaliveInterval,omitempty"`
}

// WireGuardStatuses has one object for each WireGuard link of the configuration; its ID is the
// link's name.
var WireGuardStatuses = kindOf[WireGuardStatus]("WireGuardStatuses", "WireGuardStatus",
	resource.Column{Name: "PEERS", Value: func(s any) string { return strconv.Itoa(len(s.(WireGuardStatus).Peers)) }})

// observe publishes the state of the WireGuard links, and looks at the partners of bonds again: the kernel has no event for them.
func (o *owner) observe() error {
	statuses := map[string]WireGuardStatus{}
	for _, v := range o.virtuals {
		if v.entry.WireGuard == nil {
			continue
		}
		var s WireGuardStatus
		if d, err := o.o.wireguardDevice(v.name); err != nil {
			s.Problem = err.Error()
		} else {
			s = wireguardStatus(d)
			if c, err := wireguardConfig(v.entry.WireGuard, nil); err == nil && !keyed(d, c) {
				o.due = time.Time{} // another program has changed it
			}
		}
		statuses[v.name] = s
	}
	return errors.Join(WireGuardStatuses.Replace(o.o.Store.As(ID), statuses), o.reportObjects())
}

func wireguardStatus(d *wgtypes.Device) WireGuardStatus {
	s := WireGuardStatus{PublicKey: d.PublicKey.String(), ListenPort: d.ListenPort, FirewallMark: d.FirewallMark}
	for _, p := range d.Peers {
		peer := WireGuardPeerStatus{
			PublicKey: p.PublicKey.String(), LatestHandshake: p.LastHandshakeTime,
			Received: p.ReceiveBytes, Sent: p.TransmitBytes, PersistentKeepalive: p.PersistentKeepaliveInterval,
		}
		if s.Latest.Before(p.LastHandshakeTime) {
			s.Latest = p.LastHandshakeTime
		}
		if p.Endpoint != nil {
			peer.Endpoint = p.Endpoint.String()
		}
		peer.AllowedIPs = lists.Of(p.AllowedIPs, func(n net.IPNet) netip.Prefix { return prefixOf(&n) })
		s.Peers = append(s.Peers, peer)
	}
	return s
}

// wireguardDevice asks the kernel.
func wireguardDevice(name string) (*wgtypes.Device, error) {
	client, err := wgctrl.New()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return client.Device(name)
}
