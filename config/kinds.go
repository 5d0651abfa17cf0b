package config

import (
	"maps"
	"net/netip"
	"slices"
)

// Bond makes the interface a bond of several links. Options without a default here have the kernel's
// (Documentation/networking/bonding.rst). The kernel takes some with some modes only.
type Bond struct {
	// kernel name, such as 802.3ad, active-backup; default balance-rr
	Mode     string `yaml:"mode"`
	LACPRate string `yaml:"lacpRate" file:"lacp_rate"` // slow (default) or fast
	// how traffic is distributed over the members; default layer2
	XmitHashPolicy string `yaml:"xmitHashPolicy" file:"xmit_hash_policy"`
	// ms between link checks; default 100; 0 only with arpInterval, because a failed link wouldn't be detected
	MIIMon    *int `yaml:"miimon" file:"miimon"`
	UpDelay   int  `yaml:"updelay" file:"updelay"`     // ms, a multiple of miimon
	DownDelay int  `yaml:"downdelay" file:"downdelay"` // ms, a multiple of miimon
	// required; the members, by name, alias or MAC address; the bond has the MAC address of the first one
	Interfaces []string `yaml:"interfaces"`

	// the preferred member, one of interfaces; for active-backup, balance-tlb and balance-alb
	Primary string `yaml:"primary" modes:"active-backup, balance-tlb, balance-alb"`
	// when a primary that is back is used again: always, better or failure
	PrimaryReselect string `yaml:"primaryReselect" file:"primary_reselect" modes:"active-backup, balance-tlb, balance-alb"`
	// whose MAC address the bond has: none, active or follow; for active-backup
	FailOverMAC string `yaml:"failOverMac" file:"fail_over_mac" modes:"active-backup"`
	// members that must work, or the bond has no carrier; for 802.3ad
	MinLinks *int `yaml:"minLinks" file:"min_links" modes:"802.3ad"`

	// when another aggregator is chosen: stable, bandwidth or count; for 802.3ad
	ADSelect       string `yaml:"adSelect" file:"ad_select" modes:"802.3ad"`
	ADActorSysPrio *int   `yaml:"adActorSysPrio" file:"ad_actor_sys_prio" modes:"802.3ad"` // 1 to 65535; for 802.3ad
	ADUserPortKey  *int   `yaml:"adUserPortKey" file:"ad_user_port_key" modes:"802.3ad"`   // 0 to 1023; for 802.3ad
	ADActorSystem  string `yaml:"adActorSystem" file:"ad_actor_system"`                    // a MAC address; for 802.3ad
	// speak first, as is usual, or only to a switch that does; for 802.3ad
	LACPActive *bool `yaml:"lacpActive" file:"lacp_active" modes:"802.3ad"`

	// ms between requests to arpIPTarget, which detect a failed path instead of miimon; for active-backup, balance-rr,
	// balance-xor and broadcast
	ARPInterval int `yaml:"arpInterval" file:"arp_interval" modes:"active-backup, balance-rr, balance-xor, broadcast"`
	// 1 to 16 IPv4 addresses
	ARPIPTarget []netip.Addr `yaml:"arpIPTarget"`
	// requests without an answer after which a path has failed, 1 to 255
	ARPMissedMax int `yaml:"arpMissedMax" file:"arp_missed_max" modes:"active-backup, balance-rr, balance-xor, broadcast"`
	// of which members answers are checked: none, active, backup or all; with filter, only packets of ARP count
	ARPValidate string `yaml:"arpValidate" file:"arp_validate" modes:"active-backup, balance-rr, balance-xor, broadcast"`
	// any or all must answer
	ARPAllTargets string `yaml:"arpAllTargets" file:"arp_all_targets" modes:"active-backup, balance-rr, balance-xor, broadcast"`

	// reports after a change of the member, 0 to 255
	ResendIGMP *int `yaml:"resendIgmp" file:"resend_igmp"`
	// announcements after a change of the member, 0 to 255
	NumPeerNotif *int `yaml:"numPeerNotif" file:"num_grat_arp"`
	// ms between these announcements, a multiple of miimon; 0 to 300000
	PeerNotifyDelay int  `yaml:"peerNotifyDelay" file:"peer_notif_delay"`
	LPInterval      *int `yaml:"lpInterval" file:"lp_interval"` // s between learning packets
	// before the next member's turn; 0 is random; for balance-rr
	PacketsPerSlave *int `yaml:"packetsPerSlave" file:"packets_per_slave" modes:"balance-rr"`
	// take packets of members that aren't in use, too
	AllSlavesActive *bool `yaml:"allSlavesActive" file:"all_slaves_active"`
	// ask the driver for the carrier, as is usual
	UseCarrier *bool `yaml:"useCarrier" file:"use_carrier"`
	// move flows by load; for balance-tlb
	TLBDynamicLB *bool `yaml:"tlbDynamicLb" file:"tlb_dynamic_lb" modes:"balance-tlb"`
}

// Bridge makes the interface a bridge: a switch between its ports, to which the node itself is connected, too.
type Bridge struct {
	// the ports, by name, alias or MAC address; the bridge has the MAC address of the first one
	Interfaces []string   `yaml:"interfaces"`
	STP        BridgeSTP  `yaml:"stp"`
	VLAN       BridgeVLAN `yaml:"vlan"`
}

// BridgeSTP has the settings of the spanning tree protocol (IEEE 802.1D).
type BridgeSTP struct {
	Enabled bool `yaml:"enabled"` // a port that would make a circle is blocked; a new port waits for twice 15 seconds
}

// BridgeVLAN has the settings of VLANs inside the bridge.
type BridgeVLAN struct {
	// VLANFiltering forwards a tagged packet only between ports that have its VLAN. All ports have those in vlans of
	// the bridge, tagged, and VLAN 1 without a tag.
	VLANFiltering bool `yaml:"vlanFiltering"`
}

// VRF makes the interface a VRF: its members have a table of routes of their own, which their routes are in by default.
type VRF struct {
	Table      uint32   `yaml:"table"`      // required; 1 to 4294967295; not 253 to 255, which are the kernel's
	Interfaces []string `yaml:"interfaces"` // the members, by name, alias or MAC address; they keep their addresses
}

// MACVLAN makes the interface a second link on another one, with a MAC address of its own.
type MACVLAN struct {
	Interface string `yaml:"interface"` // required; the link below, by name, alias or MAC address
	// who reaches whom of the links on one link: bridge (default, all), private, vepa or passthru (one only)
	Mode string `yaml:"mode"`
}

// Veth makes the interface one end of a cable between two links of the node.
type Veth struct {
	// required; the name of the other end, which may have an entry of its own for its addresses
	Peer string `yaml:"peer"`
}

// VLAN is a tagged link on top of the interface. Its name is that of the interface, a dot and the ID, such as eth0.100.
// Linux accepts 15 bytes: if the name is longer, four digits of a hash take the place of the end of the interface's
// name. Earlier releases cut the name, so such a link gets another name with the first boot of this release: sysctls
// and programs that name it must follow. An entry of machine.network.interfaces for the link itself gives it what a
// VLAN doesn't have here, such as vip, and vlans on top of it.
type VLAN struct {
	ID       int          `yaml:"vlanId"`   // required, 1 to 4094
	Protocol string       `yaml:"protocol"` // 802.1q (default), or 802.1ad for the outer tag of two
	CIDR     netip.Prefix `yaml:"cidr"`     // an address with its prefix length
	DHCP     bool         `yaml:"dhcp"`     // DHCPv4
	MTU      int          `yaml:"mtu"`      // bytes; default that of the interface
	Routes   []Route      `yaml:"routes" key:"network" apart:"table"`
}

// VLANOuter is the protocol of the outer one of two tags.
const VLANOuter = "802.1ad"

// Kinds are the kinds of links that the node makes for the entries of a link, as ip-link(8) names them: none for a
// card, and not more than one in a valid configuration.
func (l Link) Kinds() (kinds []string) {
	all := [...]string{"bond", "bridge", "vrf", "macvlan", "veth", "dummy", "wireguard"}
	for i, is := range [...]bool{l.Bond != nil, l.Bridge != nil, l.VRF != nil, l.MACVLAN != nil, l.Veth != nil, l.Dummy, l.WireGuard != nil} {
		if is {
			kinds = append(kinds, all[i])
		}
	}
	return kinds
}

// Members are the links that have this one as their master: it is a bond, bridge or VRF.
func (l Link) Members() []string {
	switch {
	case l.Bond != nil:
		return l.Bond.Interfaces
	case l.Bridge != nil:
		return l.Bridge.Interfaces
	case l.VRF != nil:
		return l.VRF.Interfaces
	}
	return nil
}

// Below are all links without which this one can't do its work, as the configuration names them.
func (l Link) Below() []string {
	if l.MACVLAN != nil {
		return []string{l.MACVLAN.Interface}
	}
	return l.Members()
}

// Ethernet has settings of a card's driver (ethtool(8)). What isn't set stays as it is, also when it is removed here.
type Ethernet struct {
	Rings    EthernetRings    `yaml:"rings"`
	Channels EthernetChannels `yaml:"channels"`
	Features map[string]bool  `yaml:"features"` // by the kernel's names, such as tx-tcp-segmentation
	// what wakes the machine: phy, unicast, multicast, broadcast, arp, magic; or off alone
	WakeOnLAN []string `yaml:"wakeOnLan"`
}

// EthernetRings are the sizes of the card's queues, in packets.
type EthernetRings struct {
	RX uint32 `yaml:"rx"` // of packets that come in
	TX uint32 `yaml:"tx"` // of packets that go out
}

// EthernetChannels are the numbers of the card's queues.
type EthernetChannels struct {
	RX       uint32 `yaml:"rx"`       // for what comes in
	TX       uint32 `yaml:"tx"`       // for what goes out
	Other    uint32 `yaml:"other"`    // for events of the link
	Combined uint32 `yaml:"combined"` // both directions in one
}

// WakeEvents are the bits of what wakes a machine (linux/ethtool.h).
var WakeEvents = map[string]uint32{"off": 0, "phy": 1, "unicast": 1 << 1, "multicast": 1 << 2, "broadcast": 1 << 3, "arp": 1 << 4, "magic": 1 << 5}

func checkEthernet(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	for i, in := range c.Machine.Network.Interfaces {
		e, where := in.Ethernet, interfaceAt(i, "ethernet")
		if e == nil {
			continue
		}
		if len(links[of[i]].Kinds()) > 0 || in.Name == loopback {
			r.bad(where, "is for cards, and %s is none", quote(in.Name))
		}
		for j, event := range e.WakeOnLAN {
			r.refuse(where.with("wakeOnLan", j), checkOneOf(event, slices.Sorted(maps.Keys(WakeEvents))))
			if event == "off" && len(e.WakeOnLAN) > 1 {
				r.bad(where.with("wakeOnLan", j), "off contradicts the other events")
			}
		}
	}
}
