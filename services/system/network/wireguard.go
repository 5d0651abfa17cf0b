package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

const (
	// lookupTime limits one query for a peer's address.
	lookupTime = 5 * time.Second
	// lookupAgain is the pause after one without an answer.
	lookupAgain = 10 * time.Second
)

// lookup is the result of a query for the name of a peer.
type lookup struct {
	host  string
	addr  netip.Addr
	err   error
	at    time.Time // when it was answered
	again bool      // the peer doesn't answer at this address
}

// keyed is the last settings of a WireGuard link.
type keyed struct {
	index int
	spec  *config.WireGuard
	named map[string]netip.Addr // the addresses behind the peers' names
}

// key sets a WireGuard link's keys and peers if they differ: to set them again
// would end its sessions. A peer whose name can't be resolved yet is set
// without an address, because it may connect to us.
func (o *owner) key(ctx context.Context, l netlink.Link, w *config.WireGuard) error {
	named := map[string]netip.Addr{}
	var errs []error
	for _, p := range w.Peers {
		host, _, err := net.SplitHostPort(p.Endpoint)
		if err != nil {
			continue // it has none; checks refuse others
		}
		if _, err := netip.ParseAddr(host); err == nil {
			continue
		}
		if named[host] = o.named[host].addr; !named[host].IsValid() {
			errs = append(errs, o.resolve(ctx, host))
		} else if o.named[host].again {
			o.resolve(ctx, host)
		}
	}
	name := l.Attrs().Name
	had := o.keyed[name]
	if had.index == l.Attrs().Index && samePeers(had, w, named) {
		return errors.Join(errs...)
	}
	c, err := wireguardConfig(w, named)
	if err == nil {
		err = o.o.configureWireGuard(name, c)
	}
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("give %s its keys: %w", name, err))...)
	}
	o.keyed[name] = keyed{l.Attrs().Index, w, named}
	return errors.Join(errs...)
}

// resolve resolves a name beside the owner's goroutine, and returns why there is no
// address yet.
func (o *owner) resolve(ctx context.Context, host string) error {
	last, asked := o.named[host]
	if !asked || last.again || last.err != nil && time.Since(last.at) >= lookupAgain {
		o.named[host] = lookup{host: host, addr: last.addr} // under way
		o.lookups.Go(func() {
			lctx, cancel := context.WithTimeout(ctx, lookupTime)
			defer cancel()
			r := lookup{host: host}
			addrs, err := net.DefaultResolver.LookupNetIP(lctx, "ip", host)
			if r.err = err; err == nil {
				r.addr = addrs[0].Unmap()
			}
			r.at = time.Now()
			select {
			case o.found <- r:
			case <-ctx.Done():
			}
		})
	}
	if last.err != nil {
		return fmt.Errorf("find the peer %s: %w", host, last.err)
	}
	return fmt.Errorf("find the peer %s: asking", host)
}

func samePeers(had keyed, w *config.WireGuard, named map[string]netip.Addr) bool {
	if had.spec == nil || had.spec.PrivateKey != w.PrivateKey || had.spec.ListenPort != w.ListenPort || had.spec.FirewallMark != w.FirewallMark {
		return false
	}
	return slices.EqualFunc(had.spec.Peers, w.Peers, func(a, b config.WireGuardPeer) bool {
		host, _, _ := net.SplitHostPort(b.Endpoint)
		return a.PublicKey == b.PublicKey && a.PresharedKey == b.PresharedKey && a.Endpoint == b.Endpoint && slices.Equal(a.AllowedIPs, b.AllowedIPs) &&
			a.PersistentKeepalive == b.PersistentKeepalive && had.named[host] == named[host]
	})
}

// wireguardConfig is the whole configuration of a link in the kernel's form.
func wireguardConfig(w *config.WireGuard, named map[string]netip.Addr) (wgtypes.Config, error) {
	private, err := wgtypes.ParseKey(string(w.PrivateKey))
	if err != nil {
		return wgtypes.Config{}, errors.New("the private key isn't one") // err may contain it
	}
	c := wgtypes.Config{PrivateKey: &private, ReplacePeers: true, FirewallMark: new(int(w.FirewallMark))}
	if w.ListenPort != 0 {
		c.ListenPort = &w.ListenPort
	}
	for _, p := range w.Peers {
		public, err := wgtypes.ParseKey(p.PublicKey)
		if err != nil {
			return c, fmt.Errorf("public key of a peer: %w", err)
		}
		peer := wgtypes.PeerConfig{PublicKey: public, ReplaceAllowedIPs: true, PersistentKeepaliveInterval: &p.PersistentKeepalive}
		if p.PresharedKey != "" {
			shared, err := wgtypes.ParseKey(string(p.PresharedKey))
			if err != nil {
				return c, fmt.Errorf("the preshared key of the peer %s isn't one", p.PublicKey) // err may contain it
			}
			peer.PresharedKey = &shared
		}
		for _, a := range p.AllowedIPs {
			peer.AllowedIPs = append(peer.AllowedIPs, *ipNet(a.Masked()))
		}
		if host, port, err := net.SplitHostPort(p.Endpoint); err == nil {
			addr, err := netip.ParseAddr(host)
			if err != nil {
				addr = named[host]
			}
			if to, err := netip.ParseAddrPort(net.JoinHostPort(addr.String(), port)); err == nil {
				peer.Endpoint = net.UDPAddrFromAddrPort(to)
			}
		}
		c.Peers = append(c.Peers, peer)
	}
	return c, nil
}

// configureWireGuard passes the configuration to the kernel.
func configureWireGuard(name string, c wgtypes.Config) error {
	client, err := wgctrl.New()
	if err != nil {
		return err
	}
	defer client.Close()
	return client.ConfigureDevice(name, c)
}
