//go:build kernel

package network

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// What the platform says is for the links and the names that the configuration says nothing of.
func TestLayerOfThePlatform(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.5.0.1/24")
	p.wire("eth1", "far1", "10.6.0.1/24")
	p.dnsmasq("--interface=far1", "--dhcp-range=10.6.0.50,10.6.0.50,2m")
	card, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{version: 2, ethernets: {id0: {match: {macaddress: "%s"}, addresses: [10.5.0.2/24], gateway4: 10.5.0.1, nameservers: {addresses: [10.5.0.9], search: [a.example]}}, eth1: {addresses: [10.6.0.2/24]}}, bonds: {}}`, card.Attrs().HardwareAddr)
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.Argument, _ = FromArgument("10.5.0.3::10.5.0.1:24:n1:eth0:none")
		o.Platform = func(context.Context, func()) ([]byte, error) { return []byte(text), nil }
	}
	n.stage(configuration.Maintenance)
	n.run(func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") })
	n.up(20 * time.Second)
	same(t, "addresses of the platform, which come before those of the kernel's argument", addresses(t, "eth0"), "10.5.0.2/24")
	same(t, "its routes", routes(t, "eth0"), "0.0.0.0/0 via 10.5.0.1 metric 1024")
	same(t, "addresses of the other card", addresses(t, "eth1"), "10.6.0.2/24")
	if r, _ := Resolvers.Get(n.store, ResolversID); fmt.Sprint(r.Spec) != "[10.5.0.9]" {
		t.Errorf("name servers %v", r.Spec)
	}
	if o, _ := OnLinks.Get(n.store, "eth0-10.5.0.2/24"); o.Spec.By != byPlatform {
		t.Errorf("the address is wanted by %q", o.Spec.By)
	}
	if s, _ := Statuses.Get(n.store, ID); !strings.Contains(fmt.Sprint(s.Spec.Problems), "bonds isn't read") {
		t.Errorf("problems %q", s.Spec.Problems)
	}
	// A configuration decides of the links that it lists.
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth1", DHCP: true}}})
	eventually.That(t, 20*time.Second, "eth1 has its lease", func() error {
		if got := addresses(t, "eth1"); fmt.Sprint(got) != "[10.6.0.50/24]" {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	same(t, "addresses of the card that isn't listed", addresses(t, "eth0"), "10.5.0.2/24")
	n.configure(config.Network{Nameservers: []netip.Addr{addr("10.5.0.8")}, Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.5.0.4/24")}}})
	eventually.That(t, 20*time.Second, "the configuration has priority", func() error {
		if got := addresses(t, "eth0"); fmt.Sprint(got) != "[10.5.0.4/24]" {
			return fmt.Errorf("%v", got)
		}
		text, err := os.ReadFile(filepath.Join(n.etc, "resolv.conf"))
		if err == nil && string(text) != "nameserver 10.5.0.8\nsearch a.example\n" {
			err = fmt.Errorf("%q", text)
		}
		return err
	})
}

// A metadata service is asked over the network, by DHCP; what it says is used when it is there.
func TestPlatformOverTheNetwork(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.5.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.5.0.50,10.5.0.50,2m")
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.Platform = func(ctx context.Context, needed func()) ([]byte, error) {
			for needed(); ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
				if got, err := addressesOf("eth0"); err == nil && len(got) > 0 {
					return []byte("{version: 1, config: [{type: physical, name: eth0, subnets: [{type: dhcp}, {type: static6, address: 'fd05::2/64'}]}]}"), nil
				}
			}
			return nil, boot.ErrNone
		}
	}
	n.configure(config.Network{})
	n.run(func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") })
	n.up(20 * time.Second)
	eventually.That(t, 20*time.Second, "both addresses are there", func() error {
		o, _ := OnLinks.Get(n.store, "eth0-fd05::2/64")
		if got := addresses(t, "eth0"); fmt.Sprint(got) != "[10.5.0.50/24]" || o.Spec.By != byPlatform {
			return fmt.Errorf("%v, %v", got, o.Spec)
		}
		return nil
	})
}
