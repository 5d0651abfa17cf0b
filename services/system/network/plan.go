package network

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

// defaultMetric of a lease's routes is that of static ones without a metric. Routes of advertisements have higher ones.
const defaultMetric = 1024

// Who wants an object: the layers of settings, the last one first.
const (
	byConfiguration = "machine.network.interfaces"
	byPlatform      = "the platform's network-config"
	byArgument      = "kernel argument " + ParamIP
	byRules         = "machine.network.rules"
	byKernel        = "router advertisement"
)

// want is an object that is wanted, and by whom.
type want struct {
	object
	by string
}

// plan is the plan of a link: the configuration's, or the default for a physical
// link that it doesn't name, or nothing.
func (o *owner) plan(l netlink.Link) (p config.Link, managed bool) {
	name, physical := l.Attrs().Name, o.o.physical(l)
	p, managed = config.Link{Name: name, DHCP: physical}, physical || name == "lo"
	if i := slices.IndexFunc(o.plans, func(l config.Link) bool { return l.Name == name }); i >= 0 {
		p, managed = o.plans[i], !o.plans[i].Ignore
	}
	if flags := o.of(l.Attrs().Index).flags; o.acceptsRA(p) {
		p.DHCP6, p.Informed = p.DHCP6 || flags&managedFlag != 0, flags&otherFlag != 0
	}
	return p, managed
}

// taken are the routes of the links so far. The kernel has one route per
// network and metric: a second one would replace the first, on another link.
type taken map[route]bool

// place gives the route the next free metric, so that the first link has
// priority.
func (t taken) place(r route) route {
	key := route{network: r.network, metric: r.metric, table: r.table}
	for t[key] {
		key.metric++
	}
	t[key], r.metric = true, key.metric
	return r
}

// kinds of routes.
var kinds = map[config.RouteType]int{
	"": unix.RTN_UNICAST, config.RouteUnicast: unix.RTN_UNICAST, config.RouteBlackhole: unix.RTN_BLACKHOLE,
	config.RouteUnreachable: unix.RTN_UNREACHABLE, config.RouteProhibit: unix.RTN_PROHIBIT,
}

// staticRoute is a route of the configuration; vrf is the table of the VRF that its link is in, or 0.
func staticRoute(index int, r config.Route, vrf uint32) route {
	return route{
		index: either(kinds[r.Type] == unix.RTN_UNICAST, index, 0), network: r.Network.Masked(), gateway: r.Gateway, source: r.Source, mtu: r.MTU,
		metric: cmp.Or(r.Metric, defaultMetric), table: cmp.Or(r.Table, vrf, unix.RT_TABLE_MAIN), kind: kinds[r.Type],
	}
}

// wanted are the objects of a link now. order counts the links that should have leases: the
// metric of a link's routes doesn't depend on whether another link has a lease already.
func wanted(index int, p config.Link, leases []*lease, order uint32, t taken, now time.Time) (out []want) {
	layer := cmp.Or(p.By, byConfiguration)
	size, sizeBy := p.MTU, layer
	var addresses []netip.Prefix
	var routes []want
	for _, a := range p.Addresses {
		addresses = append(addresses, a)
		out = append(out, want{address{index, a}, layer})
	}
	static := lists.Of(p.Routes, func(r config.Route) want { return want{t.place(staticRoute(index, r, p.Table)), layer} })
	for _, l := range leases {
		by := l.by()
		if size == 0 {
			size, sizeBy = l.mtu, by
		}
		for _, a := range l.addresses {
			if a.lasts(now) && !slices.Contains(addresses, a.Prefix) {
				addresses = append(addresses, a.Prefix)
				out = append(out, want{address{index, a.Prefix}, by})
			}
		}
		for _, r := range l.routes {
			r.index, r.metric, r.table, r.kind = index, cmp.Or(p.DHCPOptions.RouteMetric, defaultMetric+order), cmp.Or(p.DHCPOptions.RouteTable, p.Table, unix.RT_TABLE_MAIN), unix.RTN_UNICAST
			// A static route to the same network has priority.
			if slices.ContainsFunc(static, func(w want) bool { s := w.object.(route); return s.network == r.network && s.table == r.table }) {
				continue
			}
			routes = append(routes, want{t.place(r), by})
		}
	}
	if size != 0 {
		out = append(out, want{mtu{index, size}, sizeBy})
	}
	for _, w := range append(static, routes...) {
		// A gateway outside of the link's networks is reached on the link as well: some clouds assign /32.
		r := w.object.(route)
		near := slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Masked().Contains(r.gateway) })
		r.onlink = r.gateway.IsValid() && !near && !r.gateway.IsLinkLocalUnicast()
		out = append(out, want{r, w.by})
	}
	return out
}

// wantedRules are of both families if a rule has no address.
func wantedRules(rules []config.Rule) (out []want) {
	for i, r := range rules {
		for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			if a := cmp.Or(r.From, r.To).Addr(); !a.IsValid() || a.Is6() == (f == netlink.FAMILY_V6) {
				out = append(out, want{rule{r.Priority, ofAll(r.From), ofAll(r.To), r.FwMark, r.Table, f}, fmt.Sprintf("%s[%d]", byRules, i)})
			}
		}
	}
	return out
}

// ofAll is the kernel's form of a prefix: it knows none for all addresses.
func ofAll(p netip.Prefix) netip.Prefix { return either(p.Bits() == 0, netip.Prefix{}, p) }

// HasWay reports whether a node with the links that it has now would still have a way to an address with these
// settings: a link with a carrier, and a default route if it has one by its settings or a lease now. It is true if
// there is no link with a carrier: nothing can be lost.
func HasWay(s *resource.Store, n config.Network) bool {
	next, cards, up := &owner{cfg: &config.Config{}, configured: true, links: map[string]netlink.Link{}, errs: map[string]error{}, cards: map[string]string{}}, map[string]config.Card{}, map[string]bool{}
	next.cfg.Machine.Network, next.log = n, slog.New(slog.DiscardHandler)
	next.Daemon = New(Options{
		physical: func(l netlink.Link) bool { return l.Type() == "device" && l.Attrs().Name != "lo" },
		card:     func(l netlink.Link) config.Card { return cards[l.Attrs().Name] },
	})
	for i, l := range Links.List(s) {
		next.links[l.ID] = &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: l.ID, Index: i + 1}, LinkType: l.Spec.Kind}
		cards[l.ID] = config.Card{Name: l.ID, HardwareAddr: cmp.Or(l.Spec.Permanent, l.Spec.MAC), Driver: l.Spec.Driver, BusPath: l.Spec.BusPath}
		up[l.ID] = l.Spec.State == "up" && l.ID != "lo"
		for _, entry := range n.Links() {
			if key, alias := selector(entry); alias != "" && alias == l.Spec.Alias {
				next.cards[key] = cards[l.ID].HardwareAddr
			}
		}
	}
	if !slices.Contains(slices.Collect(maps.Values(up)), true) {
		return true
	}
	routed := !slices.ContainsFunc(Routes.List(s), func(o resource.Object[Object]) bool {
		return o.Spec.By != byKernel && o.Spec.Problem == "" && (strings.HasPrefix(o.Spec.What, "0.0.0.0/0 via ") || strings.HasPrefix(o.Spec.What, "::/0 via "))
	})
	next.replan()
	var plugged func(name string) bool
	plugged = func(name string) bool {
		if i := slices.IndexFunc(next.virtuals, func(v virtual) bool { return v.name == name }); i >= 0 {
			return slices.ContainsFunc(append(slices.Clip(next.virtuals[i].members), next.virtuals[i].below), plugged)
		}
		return up[name]
	}
	way := false
	for _, p := range append(next.plans, next.unlisted()...) {
		// in a VRF nobody reaches the machine API
		if p.Ignore || p.Table != 0 || next.members[p.Name] != "" || !plugged(p.Name) {
			continue
		}
		way = way || p.DHCP || p.DHCP6 || len(p.Addresses) > 0 || p.Advertised() || p.AcceptRA != config.AdvertisementsOff &&
			slices.ContainsFunc(OnLinks.List(s), func(o resource.Object[Object]) bool { return o.Spec.By == byKernel && o.Spec.Link == p.Name })
		routed = routed || p.DHCP && cmp.Or(p.DHCPOptions.RouteTable, unix.RT_TABLE_MAIN) == unix.RT_TABLE_MAIN || slices.ContainsFunc(p.Routes, func(r config.Route) bool {
			return r.Network.Bits() == 0 && r.Gateway.IsValid() && cmp.Or(r.Table, unix.RT_TABLE_MAIN) == unix.RT_TABLE_MAIN
		})
	}
	return way && routed
}

// cardOf is what the configuration can select a card by.
func cardOf(l netlink.Link) config.Card {
	a := l.Attrs()
	device := filepath.Join("/sys/class/net", a.Name, "device")
	link := func(path string) string { // "" for a link without a device
		to, _ := os.Readlink(path)
		return strings.TrimPrefix(filepath.Base(to), ".")
	}
	mac := either(len(a.PermHWAddr) > 0, a.PermHWAddr, a.HardwareAddr)
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
			l.By, l.Alias = layer.by, l.Name
			if key, alias := selector(l); alias != "" {
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

// selector is by what an entry selects its card, and what the entry is called; "": it has the card's own name.
func selector(l config.Link) (key, alias string) {
	if l.HardwareAddr+l.Driver+l.BusPath == "" {
		return "", ""
	}
	key = strings.Join([]string{l.HardwareAddr, l.Driver, l.BusPath}, " ")
	return key, cmp.Or(l.Name, strings.TrimSpace(key))
}

// selected is the name of the card that an entry selects, or its alias while there is none, or more than one. The card
// that it has once selected is kept by its address for later boots, which may find others earlier.
func (o *owner) selected(key, alias string, entry config.Link) string {
	var names []string
	chosen := ""
	for name, l := range o.links {
		if !o.o.physical(l) {
			continue
		}
		card := o.o.card(l)
		switch selects := entry.Selects(card); {
		case selects && card.HardwareAddr != "" && card.HardwareAddr == o.cards[key]:
			return name
		case o.chosen[key] == l.Attrs().Index:
			chosen = name
		case selects:
			names = append(names, name)
		}
	}
	switch {
	case chosen != "":
		return chosen
	case len(names) == 0:
		return alias
	case len(names) == 1:
		l := o.links[names[0]]
		o.chosen[key] = l.Attrs().Index
		if o.cards[key] == "" && len(l.Attrs().PermHWAddr) > 0 {
			o.cards[key] = o.o.card(l).HardwareAddr
		}
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
	return either(strings.Trim(string(mac), "0:\n") == "", "", strings.TrimSpace(string(mac))+" key "+strings.TrimSpace(string(key)))
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
