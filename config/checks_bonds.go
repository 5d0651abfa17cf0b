package config

import (
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

func checkBonds(c *Config, r *report) {
	for i, in := range c.Machine.Network.Interfaces {
		b, where := in.Bond, interfaceAt(i, "bond")
		if b == nil {
			continue
		}
		for f, value := range reflect.ValueOf(*b).Fields() {
			if modes := f.Tag.Get("modes"); modes != "" && !value.IsZero() && !slices.Contains(strings.Split(modes, ", "), b.Mode) {
				r.bad(where.with(f.Tag.Get("yaml")), "is an option of %s, and the mode of %s is %s", modes, quote(in.Name), b.Mode)
			}
		}
		// Earlier releases took these two with each mode, and the kernel doesn't use them.
		if b.LACPRate == "fast" && b.Mode != "802.3ad" {
			r.warn(where.with("lacpRate"), "isn't used with mode %s; leave it out", b.Mode)
		}
		if b.XmitHashPolicy != "layer2" && !slices.Contains([]string{"802.3ad", "balance-xor", "balance-tlb"}, b.Mode) {
			r.warn(where.with("xmitHashPolicy"), "isn't used with mode %s; leave it out", b.Mode)
		}
		if b.Primary != "" {
			r.refuse(where.with("primary"), checkOneOf(b.Primary, b.Interfaces))
		}
		b.checkMonitor(r, where)
		if _, err := net.ParseMAC(b.ADActorSystem); b.ADActorSystem != "" && (err != nil || b.Mode != "802.3ad") {
			r.bad(where.with("adActorSystem"), "%s is not a MAC address for a bond of mode 802.3ad", quote(b.ADActorSystem))
		}
	}
}

// maxARPTargets is BOND_MAX_ARP_TARGETS of the kernel.
const maxARPTargets = 16

// checkMonitor requires one way to detect a failed link.
func (b Bond) checkMonitor(r *report, where place) {
	monitor := *b.MIIMon
	switch arp := b.ARPInterval != 0; {
	case arp && monitor != 0:
		r.bad(where.with("miimon"), "contradicts arpInterval: the kernel allows one of both")
	case arp && len(b.ARPIPTarget) == 0:
		r.lacks(where.with("arpIPTarget"), "arpInterval needs it")
	case !arp && len(b.ARPIPTarget) > 0 || len(b.ARPIPTarget) > maxARPTargets:
		r.bad(where.with("arpIPTarget"), "has %d addresses: arpInterval needs 1 to %d, which need arpInterval", len(b.ARPIPTarget), maxARPTargets)
	case slices.ContainsFunc(b.ARPIPTarget, netip.Addr.Is6):
		r.bad(where.with("arpIPTarget"), "must have IPv4 addresses only")
	case !arp && monitor == 0:
		r.bad(where.with("miimon"), "0 turns the link checks off: the bond would go on to use a member whose link has failed; leave it out for 100 ms")
	}
	for _, delay := range []struct {
		name string
		ms   int
	}{{"miimon", monitor}, {"updelay", b.UpDelay}, {"downdelay", b.DownDelay}, {"peerNotifyDelay", b.PeerNotifyDelay}} {
		switch {
		case delay.ms < 0:
			r.bad(where.with(delay.name), "must not be negative")
		case monitor == 0 && delay.ms > 0:
			r.warn(where.with(delay.name), "isn't used with arpInterval; leave it out")
		case monitor > 0 && delay.ms%monitor != 0:
			r.bad(where.with(delay.name), "%d ms is not a multiple of miimon, %d ms", delay.ms, monitor)
		}
	}
}
