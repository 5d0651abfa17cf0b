package network

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/config"
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

// replan makes the plans of the links from the configuration and the cards that are there. A
// selected card keeps its entry as long as it is there, also with another MAC address: a bond
// gives its members its own.
func (o *owner) replan() {
	o.aliases, o.settings = map[string]string{}, o.cfg.Machine.Network
	real := map[string]string{} // by name in the configuration
	var links []config.Link
	for _, layer := range o.layers() {
		o.settings.Hostname = cmp.Or(o.settings.Hostname, layer.Hostname)
		higher := len(links)
		for _, l := range layer.Links() {
			if l.By, l.Alias = layer.by, l.Name; l.HardwareAddr+l.Driver+l.BusPath != "" {
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

// partnerOf is the MAC address and the key of the switch that a bond with LACP has found, or "". The library doesn't
// read them.
func partnerOf(bond string) string {
	// there is none for other links
	mac, _ := os.ReadFile(filepath.Join("/sys/class/net", bond, "bonding/ad_partner_mac"))
	key, _ := os.ReadFile(filepath.Join("/sys/class/net", bond, "bonding/ad_partner_key"))
	if strings.Trim(string(mac), "0:\n") == "" {
		return ""
	}
	return strings.TrimSpace(string(mac)) + " key " + strings.TrimSpace(string(key))
}

// tuned are the last settings of a card's driver, and what it said.
type tuned struct {
	spec *config.Ethernet
	at   time.Time
	err  error
}

// tune gives a card's driver its settings: once, and then each minute if they aren't so any more. A driver may reset
// its card for them.
func (o *owner) tune(l netlink.Link, e *config.Ethernet, now time.Time) error {
	if e == nil {
		return nil
	}
	had := &o.of(l.Attrs().Index).tuned
	if had.spec == e && now.Sub(had.at) < againMax {
		return had.err
	}
	err := configureDriver(l.Attrs().Name, e)
	if err != nil {
		err = fmt.Errorf("settings of the driver of %s: %w", l.Attrs().Name, err)
	}
	*had = tuned{e, now, err}
	return err
}

// configureDriver changes what is different from the settings.
func configureDriver(link string, e *config.Ethernet) error {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return err
	}
	defer tool.Close()
	var wake uint32
	for _, event := range e.WakeOnLAN {
		wake |= config.WakeEvents[event]
	}
	return errors.Join(
		adjust("rings", link, e.Rings != config.EthernetRings{}, tool.GetRing, tool.SetRing, func(r *ethtool.Ring) {
			r.RxPending, r.TxPending = cmp.Or(e.Rings.RX, r.RxPending), cmp.Or(e.Rings.TX, r.TxPending)
		}),
		adjust("channels", link, e.Channels != config.EthernetChannels{}, tool.GetChannels, tool.SetChannels, func(c *ethtool.Channels) {
			c.RxCount, c.TxCount = cmp.Or(e.Channels.RX, c.RxCount), cmp.Or(e.Channels.TX, c.TxCount)
			c.OtherCount, c.CombinedCount = cmp.Or(e.Channels.Other, c.OtherCount), cmp.Or(e.Channels.Combined, c.CombinedCount)
		}),
		adjust("wakeOnLan", link, len(e.WakeOnLAN) > 0, tool.GetWakeOnLan, tool.SetWakeOnLan, func(w *ethtool.WakeOnLan) { w.Opts = wake }),
		setFeatures(tool, link, e.Features),
	)
}

// adjust writes settings of a driver if they change.
func adjust[T comparable](what, link string, wanted bool, get func(string) (T, error), set func(string, T) (T, error), change func(*T)) error {
	if !wanted {
		return nil
	}
	is, err := get(link)
	want := is
	if change(&want); err == nil && want != is {
		_, err = set(link, want)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// setFeatures looks again afterwards: the kernel ignores what a driver can't change.
func setFeatures(tool *ethtool.Ethtool, link string, want map[string]bool) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(want)) {
		err := tool.Change(link, map[string]bool{name: want[name]})
		if is, _ := tool.Features(link); err == nil && is[name] != want[name] {
			err = errors.New("the driver doesn't change it")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("feature %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
