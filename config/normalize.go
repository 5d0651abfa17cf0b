package config

import (
	"net"
	"strings"
)

// joinAlias is the name of a worker in older files.
const joinAlias = "join"

// loAlias is the name of the loopback interface in some files.
const loAlias, loopback = "lo0", "lo"

// normalize replaces deprecated spellings of values, with a warning each, and the forms of
// MAC addresses, so that the rest of the system knows only one spelling. The decoder handles
// deprecated names of fields (see renamed and lenientLists).
func normalize(c *Config, r *report) {
	if c.Machine.Type == joinAlias {
		r.warn(at("machine", "type"), "%q is an alias; use %q", joinAlias, Worker)
		c.Machine.Type = Worker
	}
	for i := range c.Machine.Network.Interfaces {
		in := &c.Machine.Network.Interfaces[i]
		if in.Name == loAlias {
			r.warn(at("machine", "network", "interfaces", i, "interface"), "%q is an alias; Linux calls it %q", loAlias, loopback)
			in.Name = loopback
		}
		in.HardwareAddr = macAddress(strings.ToLower(strings.ReplaceAll(in.HardwareAddr, "-", ":")))
		members := in.link().Members()
		for j := range members {
			members[j] = macAddress(members[j])
		}
		if in.Bond != nil {
			in.Bond.ADActorSystem = macAddress(in.Bond.ADActorSystem)
		}
		if in.MACVLAN != nil {
			in.MACVLAN.Interface = macAddress(in.MACVLAN.Interface)
		}
	}
}

// macAddress is a MAC address as Linux writes it. Other texts stay.
func macAddress(text string) string {
	if mac, err := net.ParseMAC(text); err == nil {
		return mac.String()
	}
	return text
}
