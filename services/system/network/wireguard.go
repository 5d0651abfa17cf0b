package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

const (
	// lookupTime limits one query for a peer's address.
	lookupTime = 5 * time.Second
	// lookupAgain is the pause after one without an answer.
	lookupAgain = 10 * time.Second
)

// lookup is the result of a query for the name of a peer.
type lookup struct {
	addr netip.Addr
	err  error
	at   time.Time // when it was asked, then when it was answered
}

// key sets a WireGuard link's keys and peers if the kernel has others: to set them again
// would end its sessions. A peer whose name can't be resolved yet is set
// without an address, because it may connect to us.
func (o *owner) key(ctx context.Context, l netlink.Link, w *config.WireGuard) error {
	name, m := l.Attrs().Name, o.of(l.Attrs().Index)
	has, err := o.o.wireguard(name, nil)
	if err != nil {
		o.tunnels[name] = WireGuardStatus{Problem: err.Error()}
		return fmt.Errorf("the state of %s: %w", name, err)
	}
	status, named := wireguardStatus(has), map[string]netip.Addr{}
	var errs []error
	for _, p := range w.Peers {
		own := &WireGuardPeerStatus{} // of one that the kernel doesn't have yet
		if i := slices.IndexFunc(status.Peers, func(s WireGuardPeerStatus) bool { return s.PublicKey == p.PublicKey }); i >= 0 {
			own = &status.Peers[i]
		}
		silent := time.Since(own.LatestHandshake) > silentAfter && !m.keyed.IsZero() && time.Since(m.keyed) > silentAfter
		if silent && p.PersistentKeepalive > 0 {
			own.Problem = fmt.Sprintf("the peer %s has been silent for more than %s", p.PublicKey, silentAfter)
		}
		host, _, err := net.SplitHostPort(p.Endpoint)
		if _, isName := netip.ParseAddr(host); err != nil || isName == nil {
			continue // without an endpoint, or with an address
		}
		if named[host] = o.named[host].addr; !named[host].IsValid() {
			err := o.resolve(ctx, host, lookupAgain)
			own.Problem, errs = err.Error(), append(errs, err)
		} else if silent { // it may have moved
			o.resolve(ctx, host, silentAfter)
		}
	}
	o.tunnels[name] = status
	c, err := wireguardConfig(w, named)
	if err == nil && (!keyed(has, c) || !reflect.DeepEqual(m.wireguard, c)) {
		_, err = o.o.wireguard(name, &c)
		m.keyed = time.Now()
	}
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("give %s its keys: %w", name, err))...)
	}
	m.wireguard = c
	return errors.Join(errs...)
}

// resolve resolves a name beside the owner's goroutine, if that was long ago, and returns why there is no
// address yet.
func (o *owner) resolve(ctx context.Context, host string, again time.Duration) error {
	last := o.named[host]
	if time.Since(last.at) >= again {
		o.named[host] = lookup{last.addr, last.err, time.Now()}
		o.lookups.Go(func() {
			lctx, cancel := context.WithTimeout(ctx, lookupTime)
			defer cancel()
			r := lookup{addr: last.addr}
			addrs, err := net.DefaultResolver.LookupNetIP(lctx, "ip", host)
			if r.err = err; err == nil {
				r.addr = addrs[0].Unmap()
			}
			r.at = time.Now()
			o.tell(ctx, func() bool { o.named[host] = r; return true })
		})
	}
	return fmt.Errorf("find the peer %s: %w", host, cmp.Or(last.err, errors.New("asking")))
}

// keyed reports whether a link has this configuration. It says nothing of the endpoints: the kernel changes them when a
// peer has moved.
func keyed(d *wgtypes.Device, c wgtypes.Config) bool {
	return d.PrivateKey == *c.PrivateKey && d.FirewallMark == *c.FirewallMark && (c.ListenPort == nil || d.ListenPort == *c.ListenPort) &&
		len(d.Peers) == len(c.Peers) && !slices.ContainsFunc(c.Peers, func(want wgtypes.PeerConfig) bool {
		return !slices.ContainsFunc(d.Peers, func(p wgtypes.Peer) bool {
			return p.PublicKey == want.PublicKey && p.PresharedKey == *want.PresharedKey && p.PersistentKeepaliveInterval == *want.PersistentKeepaliveInterval &&
				len(p.AllowedIPs) == len(want.AllowedIPs) && !slices.ContainsFunc(want.AllowedIPs, func(n net.IPNet) bool {
				return !slices.ContainsFunc(p.AllowedIPs, func(is net.IPNet) bool { return is.String() == n.String() })
			})
		})
	})
}

// wireguardConfig is the whole configuration of a link in the kernel's form.
func wireguardConfig(w *config.WireGuard, named map[string]netip.Addr) (wgtypes.Config, error) {
	private, err := wgtypes.ParseKey(string(w.PrivateKey))
	if err != nil {
		return wgtypes.Config{}, errors.New("the private key isn't one") // err may contain it
	}
	c := wgtypes.Config{PrivateKey: &private, ReplacePeers: true, FirewallMark: new(int(w.FirewallMark)), ListenPort: either(w.ListenPort != 0, &w.ListenPort, nil)}
	for _, p := range w.Peers {
		public, err := wgtypes.ParseKey(p.PublicKey)
		if err != nil {
			return c, fmt.Errorf("public key of a peer: %w", err)
		}
		peer := wgtypes.PeerConfig{PublicKey: public, ReplaceAllowedIPs: true, PersistentKeepaliveInterval: &p.PersistentKeepalive, PresharedKey: new(wgtypes.Key)}
		if p.PresharedKey != "" {
			if *peer.PresharedKey, err = wgtypes.ParseKey(string(p.PresharedKey)); err != nil {
				return c, fmt.Errorf("the preshared key of the peer %s isn't one", p.PublicKey) // err may contain it
			}
		}
		for _, a := range p.AllowedIPs {
			network := *ipNet(a.Masked())
			same := func(n net.IPNet) bool { return n.String() == network.String() }
			for i := range c.Peers { // a network is that of its last peer
				c.Peers[i].AllowedIPs = slices.DeleteFunc(c.Peers[i].AllowedIPs, same)
			}
			peer.AllowedIPs = append(slices.DeleteFunc(peer.AllowedIPs, same), network)
		}
		if host, port, err := net.SplitHostPort(p.Endpoint); err == nil {
			addr, err := netip.ParseAddr(host)
			addr = either(err == nil, addr, named[host])
			if to, err := netip.ParseAddrPort(net.JoinHostPort(addr.String(), port)); err == nil {
				peer.Endpoint = net.UDPAddrFromAddrPort(to)
			}
		}
		c.Peers = append(c.Peers, peer)
	}
	return c, nil
}

// wireguard asks the kernel for a link after a change, which may be nil.
func wireguard(name string, change *wgtypes.Config) (*wgtypes.Device, error) {
	client, err := wgctrl.New()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	if change != nil {
		err = client.ConfigureDevice(name, *change)
	}
	if err != nil {
		return nil, err
	}
	return client.Device(name)
}

// observeEvery is how often the kernel is asked for what it reports no changes of: neighbours, the partners of bonds,
// and WireGuard links, which another program may have changed. At each keepalive of 5 s their counters change.
const observeEvery = 5 * time.Second

// silentAfter is when a session without a new handshake has ended (REJECT_AFTER_TIME of WireGuard).
const silentAfter = 3 * time.Minute

// WireGuardStatus is the state of a WireGuard link in the kernel, as `wg show` prints it. The
// private key and preshared ones aren't part of it.
type WireGuardStatus struct {
	PublicKey  string `yaml:"publicKey,omitempty" column:"PUBLIC KEY"`
	ListenPort int    `yaml:"listenPort,omitempty" column:"PORT"`
	// of the packets that it sends
	FirewallMark int                   `yaml:"firewallMark,omitempty"`
	Latest       time.Time             `yaml:"latestHandshake,omitempty" column:"LATEST HANDSHAKE"` // of all peers
	Peers        []WireGuardPeerStatus `yaml:"peers,omitempty"`
	Problem      string                `yaml:"problem,omitempty"` // why the kernel's state is unknown
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
	Problem             string         `yaml:"problem,omitempty"` // of its name, or its silence
}

// WireGuardStatuses has one object for each WireGuard link of the configuration; its ID is the
// link's name.
var WireGuardStatuses = kindOf[WireGuardStatus]("WireGuardStatuses", "WireGuardStatus",
	resource.Column{Name: "PROBLEM", Value: func(s any) string { return strings.Join(resource.Problems(s), "; ") }},
	resource.Column{Name: "PEERS", Value: func(s any) string { return strconv.Itoa(len(s.(WireGuardStatus).Peers)) }})

func wireguardStatus(d *wgtypes.Device) WireGuardStatus {
	s := WireGuardStatus{PublicKey: d.PublicKey.String(), ListenPort: d.ListenPort, FirewallMark: d.FirewallMark}
	for _, p := range d.Peers {
		peer := WireGuardPeerStatus{
			PublicKey: p.PublicKey.String(), LatestHandshake: p.LastHandshakeTime,
			Received: p.ReceiveBytes, Sent: p.TransmitBytes, PersistentKeepalive: p.PersistentKeepaliveInterval,
		}
		s.Latest = either(s.Latest.Before(p.LastHandshakeTime), p.LastHandshakeTime, s.Latest)
		if p.Endpoint != nil {
			peer.Endpoint = p.Endpoint.String()
		}
		peer.AllowedIPs = lists.Of(p.AllowedIPs, func(n net.IPNet) netip.Prefix { return prefixOf(&n) })
		s.Peers = append(s.Peers, peer)
	}
	return s
}
