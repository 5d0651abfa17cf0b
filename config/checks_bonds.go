package config

import (
	"cmp"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
)

var (
	bondModes      = []string{"balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb"}
	lacpRates      = []string{"slow", "fast"}
	hashes         = []string{"layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac"}
	reselects      = []string{"always", "better", "failure"}
	failOverMACs   = []string{"none", "active", "follow"}
	adSelects      = []string{"stable", "bandwidth", "count"}
	arpValidations = []string{"none", "active", "backup", "all"}
	arpTargets     = []string{"any", "all"}
)

// bondOption is one that the kernel allows with some modes, or values, only.
type bondOption struct {
	name    string
	set     bool
	modes   string   // separated by blanks; "" for all
	value   string   // of a text
	values  []string // all that it can be
	n, most int      // of a number
}

// options are those that need a check.
func (b Bond) options() []bondOption {
	const lacp, single, arp = "802.3ad", "active-backup balance-tlb balance-alb", "active-backup balance-rr balance-xor broadcast"
	text := func(name, value, modes string, values []string) bondOption {
		return bondOption{name: name, set: value != "", modes: modes, value: value, values: values}
	}
	number := func(name string, n *int, modes string, most int) bondOption {
		return bondOption{name: name, set: n != nil, modes: modes, n: *cmp.Or(n, new(0)), most: most}
	}
	return []bondOption{
		text("primary", b.Primary, single, b.Interfaces), text("primaryReselect", b.PrimaryReselect, single, reselects),
		text("failOverMac", b.FailOverMAC, "active-backup", failOverMACs), text("adSelect", b.ADSelect, lacp, adSelects),
		text("arpValidate", b.ARPValidate, arp, arpValidations), text("arpAllTargets", b.ARPAllTargets, arp, arpTargets),
		number("minLinks", b.MinLinks, lacp, math.MaxUint16), number("adActorSysPrio", b.ADActorSysPrio, lacp, math.MaxUint16),
		number("adUserPortKey", b.ADUserPortKey, lacp, 1023), number("lpInterval", b.LPInterval, "", math.MaxInt32),
		number("resendIgmp", b.ResendIGMP, "", math.MaxUint8), number("numPeerNotif", b.NumPeerNotif, "", math.MaxUint8),
		number("packetsPerSlave", b.PacketsPerSlave, "balance-rr", math.MaxUint16),
		{name: "arpInterval", set: b.ARPInterval != 0, modes: arp, n: b.ARPInterval, most: math.MaxInt32},
		{name: "tlbDynamicLb", set: b.TLBDynamicLB != nil, modes: "balance-tlb"},
	}
}

func checkBonds(c *Config, r *report) {
	for i, in := range c.Machine.Network.Interfaces {
		b, where := in.Bond, interfaceAt(i, "bond")
		if b == nil {
			continue
		}
		oneOf(r, where.with("mode"), b.Mode, bondModes)
		oneOf(r, where.with("lacpRate"), b.LACPRate, lacpRates)
		oneOf(r, where.with("xmitHashPolicy"), b.XmitHashPolicy, hashes)
		for _, o := range b.options() {
			switch {
			case !o.set:
			case o.modes != "" && !slices.Contains(strings.Fields(o.modes), b.Mode):
				r.bad(where.with(o.name), "is an option of %s, and the mode of %s is %s", strings.ReplaceAll(o.modes, " ", ", "), quote(in.Name), b.Mode)
			case o.values != nil:
				oneOf(r, where.with(o.name), o.value, o.values)
			case o.n < 0 || o.n > o.most:
				r.bad(where.with(o.name), "%d is out of range (0 to %d)", o.n, o.most)
			}
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
		r.bad(where.with("miimon"), "0 turns the link checks off: the bond would go on to use a member whose link has failed; leave it out for %d ms", defaultMIIMon)
	}
	for _, delay := range []struct {
		name string
		ms   int
	}{{"miimon", monitor}, {"updelay", b.UpDelay}, {"downdelay", b.DownDelay}} {
		switch {
		case delay.ms < 0:
			r.bad(where.with(delay.name), "must not be negative")
		case monitor > 0 && delay.ms%monitor != 0:
			r.bad(where.with(delay.name), "%d ms is not a multiple of miimon, %d ms", delay.ms, monitor)
		}
	}
}
