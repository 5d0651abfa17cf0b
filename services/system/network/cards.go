package network

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
)

// cardOf is what the configuration can select a card by.
func cardOf(l netlink.Link) config.Card {
	a := l.Attrs()
	device := filepath.Join("/sys/class/net", a.Name, "device")
	link := func(path string) string { // "" for a link without a device
		to, _ := os.Readlink(path)
		return strings.TrimPrefix(filepath.Base(to), ".")
	}
	mac := a.PermHWAddr
	if len(mac) == 0 {
		mac = a.HardwareAddr
	}
	return config.Card{Name: a.Name, HardwareAddr: mac.String(), Driver: link(filepath.Join(device, "driver")), BusPath: link(device)}
}

// layer is one of the settings, and who has made it.
type layer struct {
	config.Network
	by string
}

// layers are those of the settings. The first one that has a link decides of the link; so with names and servers.
func (o *owner) layers() []layer {
	all := []layer{{o.cfg.Machine.Network, byConfiguration}, {o.platform.network, byPlatform}, {o.o.Argument, byArgument}}
	switch {
	case o.configured:
		return all[:2]
	case o.byHand:
		return all[:1]
	}
	return all
}

// replan makes the plans of the links from the configuration and the cards that are there. A
// selected card keeps its entry as long as it is there, also with another MAC address: a bond
// gives its members its own.
func (o *owner) replan() {
	o.aliases, o.settings = map[string]string{}, o.cfg.Machine.Network
	real := map[string]string{} // by name in the configuration
	var links []config.Link
	for _, layer := range o.layers() {
		o.settings.Hostname = cmp.Or(o.settings.Hostname, layer.Hostname)
		if len(o.settings.Nameservers) == 0 {
			o.settings.Nameservers = layer.Nameservers
		}
		if len(o.settings.SearchDomains) == 0 {
			o.settings.SearchDomains = layer.SearchDomains
		}
		higher := len(links)
		for _, l := range layer.Links() {
			if l.By = layer.by; l.HardwareAddr+l.Driver+l.BusPath != "" {
				key := strings.Join([]string{l.HardwareAddr, l.Driver, l.BusPath}, " ")
				alias := cmp.Or(l.Name, strings.TrimSpace(key))
				l.Name = o.selected(key, alias, l)
				if real[alias] = l.Name; l.Name != alias {
					o.aliases[l.Name] = cmp.Or(o.aliases[l.Name], alias)
				}
			}
			i := slices.IndexFunc(links, func(h config.Link) bool { return h.Name == l.Name })
			if i < 0 {
				links = append(links, l)
			} else if i >= higher {
				o.refused("choose "+l.Name, fmt.Errorf("two entries are for %s, one by its name, one by what selects it: the first one counts", l.Name))
			}
		}
	}
	o.plans, o.virtuals, o.members = expand(links, func(called string) string {
		if name, known := real[called]; known {
			return name
		} else if mac, err := net.ParseMAC(called); err == nil {
			return o.selected(called, called, config.Link{HardwareAddr: mac.String()})
		}
		return called
	})
}

// selected is the name of the card that an entry selects, or its alias while there is none, or more than one.
func (o *owner) selected(key, alias string, entry config.Link) string {
	var names []string
	for name, l := range o.links {
		if !o.o.physical(l) {
			continue
		}
		if o.chosen[key] == l.Attrs().Index {
			return name
		}
		if entry.Selects(o.o.card(l)) {
			names = append(names, name)
		}
	}
	switch len(names) {
	case 0:
		return alias
	case 1:
		o.chosen[key] = o.links[names[0]].Attrs().Index
		o.log.Info(fmt.Sprintf("%s is the card of the entry %q", names[0], alias))
		return names[0]
	}
	slices.Sort(names)
	o.refused("choose "+alias, fmt.Errorf("choose the card of the entry %q: %s match: select it by its hardwareAddr", alias, strings.Join(names, ", ")))
	return alias
}

// partnerOf is the MAC address and the key of the switch that a bond with LACP has found, or "". The library doesn't read them.
func partnerOf(bond string) string {
	mac, _ := os.ReadFile(filepath.Join("/sys/class/net", bond, "bonding/ad_partner_mac")) // there is none for other links
	key, _ := os.ReadFile(filepath.Join("/sys/class/net", bond, "bonding/ad_partner_key"))
	if strings.Trim(string(mac), "0:\n") == "" {
		return ""
	}
	return strings.TrimSpace(string(mac)) + " key " + strings.TrimSpace(string(key))
}
