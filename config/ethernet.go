package config

import (
	"maps"
	"slices"
)

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
