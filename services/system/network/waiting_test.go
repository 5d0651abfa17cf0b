package network

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A node with two links by DHCP waits for the one that had its address before,
// whether that has no answer yet or no carrier. For other links it waits only
// linkGrace, and for none without an end.
func TestWaitsForTheAddressThatItHasHad(t *testing.T) {
	t.Parallel()
	const was, other = "10.0.0.9/24", "10.1.0.9/24"
	for name, test := range map[string]struct {
		pinned, first string // the address of an earlier boot, and that of the faster link
		carrier       bool   // of the slow one
		unnamed       bool   // there is no name server
		want          time.Duration
	}{
		"the first boot":                   {"", other, true, false, linkGrace},
		"the first boot, one unplugged":    {"", other, false, false, 0},
		"no name server yet":               {"", other, false, true, linkGrace},
		"it is there already":              {was, was, true, false, linkGrace},
		"it may come with the other link":  {was, other, true, false, pinGrace},
		"or with one that has no link yet": {was, other, false, false, pinGrace},
		"or with an advertisement":         {"2001:db8::9/64", other, false, false, pinGrace},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				quick, slow := netlink.LinkAttrs{Name: "eth0", Index: 2, RawFlags: unix.IFF_LOWER_UP}, netlink.LinkAttrs{Name: "eth1", Index: 3}
				if test.carrier {
					slow.RawFlags = unix.IFF_LOWER_UP
				}
				o := &owner{
					cfg:   &config.Config{},
					links: map[string]netlink.Link{"eth0": &netlink.Device{LinkAttrs: quick}, "eth1": &netlink.Device{LinkAttrs: slow}},
					clients: map[leaseKey]*client{
						{"eth0", "DHCP"}: {lease: &lease{addresses: []leasedAddress{{Prefix: netip.MustParsePrefix(test.first)}}}},
						{"eth1", "DHCP"}: {},
					},
					Daemon: New(Options{physical: func(netlink.Link) bool { return true }}),
					wanted: []want{{address{2, netip.MustParsePrefix(test.first)}, ""}},
					state:  actual{objects: map[object]bool{address{2, netip.MustParsePrefix(test.first)}: true}},
				}
				if !test.unnamed {
					o.cfg.Machine.Network.Nameservers = []netip.Addr{addr("10.0.0.53")}
				}
				if test.pinned != "" {
					o.pinned = netip.MustParsePrefix(test.pinned).Addr()
				}
				began, reported := time.Now(), ""
				for lacking := o.lacking(o.candidates()); len(lacking) > 0; lacking = o.lacking(o.candidates()) {
					reported = errors.Join(lacking...).Error()
					time.Sleep(time.Second)
				}
				if took := time.Since(began); took != test.want {
					t.Errorf("it waits %s, not %s, for %s", took, test.want, reported)
				}
				if named := strings.Contains(reported, "the address that the node has had"); named != (test.want == pinGrace) {
					t.Errorf("it says that it waits for %s", reported)
				}
			})
		})
	}
}

// An entry that leaves the addresses to router advertisements waits for one, and says so.
func TestWaitsForAdvertisements(t *testing.T) {
	t.Parallel()
	for want, entry := range map[string]config.Link{
		`router advertisement on "eth0"`:   {Name: "eth0", AcceptRA: config.AdvertisementsOn},
		"a router advertisement on eth0":   {Name: "eth0", MTU: 1400},
		"a network card to appear":         {Name: "eth0", AcceptRA: config.AdvertisementsOff},
		`address 2001:db8::9/64 on "eth0"`: {Name: "eth0", AcceptRA: config.AdvertisementsOn, Addresses: []netip.Prefix{prefix("2001:db8::9/64")}},
	} {
		o := &owner{
			cfg: &config.Config{}, plans: []config.Link{entry}, Daemon: New(Options{physical: func(netlink.Link) bool { return true }}),
			links: map[string]netlink.Link{"eth0": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2}}},
		}
		if got := errors.Join(o.lacking(nil)...).Error(); got != want {
			t.Errorf("%+v: it waits for %s, want %s", entry, got, want)
		}
		// Nobody can have a name server for it.
		if strings.Contains(fmt.Sprint(o.lacking([]candidate{{}})), "name server") {
			t.Errorf("%+v: it waits for a name server", entry)
		}
	}
}

// An address that another host has is the reason of the wait, of both families; an address of IPv6 has no other sign
// than the kernel's.
func TestWaitsForATakenAddress(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"2001:db8::9/64": "the address 2001:db8::9/64 of eth0 to be free: another host of the network has this address",
		"10.0.0.9/24":    "the address 10.0.0.9/24 of eth0 to be free: another host of the network has this address: MAC 02:00:00:00:00:07",
	} {
		own := address{2, prefix(text)}
		o := &owner{
			cfg: &config.Config{}, plans: []config.Link{{Name: "eth0", Addresses: []netip.Prefix{own.prefix}}},
			Daemon: New(Options{physical: func(netlink.Link) bool { return true }}), wanted: []want{{own, ""}},
			links: map[string]netlink.Link{"eth0": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2, RawFlags: unix.IFF_LOWER_UP}}},
		}
		if own.prefix.Addr().Is6() {
			o.state.objects = map[object]bool{own: false} // duplicate address detection has failed
		} else {
			o.watches = map[address]watch{own: {asked: true, conflict: conflict{"02:00:00:00:00:07", true}}}
		}
		lacking := o.lacking(o.candidates())
		if got := errors.Join(lacking...).Error(); got != says || reason.Of(lacking[0]) != AddressTaken {
			t.Errorf("it waits for %s (%s), want %s", got, reason.Of(lacking[0]), says)
		}
	}
}
