package network

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

// ours is the mark of our routes and rules, their protocol, and of our links, their group. The kernel's table of
// protocols (rtnetlink.h) doesn't have the number.
const ours = 103

// object is a setting in the kernel that networkd makes: an address, a route, a rule or an MTU.
// Its value identifies it.
type object interface {
	// link is the index of its link; 0 for none.
	link() int
	// change adds it, or removes it.
	change(add bool) error
	// on is its name for users; link is the name of its link.
	on(link string) string
}

type (
	address struct {
		index  int
		prefix netip.Prefix
	}
	// route without a gateway is to a network on the link itself.
	route struct {
		index   int
		network netip.Prefix
		gateway netip.Addr
		metric  uint32
		table   uint32
		source  netip.Addr
		mtu     int
		kind    int  // RTN_UNICAST …
		onlink  bool // the gateway isn't in a network of the link
	}
	rule struct {
		priority uint32
		from, to netip.Prefix
		mark     uint32
		table    uint32
		family   int // netlink.FAMILY_V4 or FAMILY_V6
	}
	mtu     struct{ index, bytes int }
	member  struct{ index, master int } // of a bond, bridge or VRF
	tagged  struct{ index, vlan int }   // a VLAN that a port of a bridge has, or the bridge itself
	altname struct {                    // a second name of a link, which programs can use as the first
		index int
		name  string
	}
)

func (a address) link() int { return a.index }
func (r route) link() int   { return r.index }
func (r rule) link() int    { return 0 }
func (m mtu) link() int     { return m.index }
func (a altname) link() int { return a.index }
func (v tagged) link() int  { return v.index }
func (m member) link() int  { return m.index }

func (a address) on(link string) string { return fmt.Sprintf("address %s of %s", a.prefix, link) }
func (a altname) on(link string) string { return fmt.Sprintf("name %s of %s", a.name, link) }
func (v tagged) on(link string) string  { return fmt.Sprintf("VLAN %d on %s", v.vlan, link) }
func (m member) on(link string) string  { return "membership of " + link }

// A rule of both families has no addresses.
func (r rule) on(string) string {
	return fmt.Sprint("rule ", r.priority, map[bool]string{true: "-IPv6"}[r.family == netlink.FAMILY_V6 && r.from == r.to])
}
func (m mtu) on(link string) string { return fmt.Sprintf("MTU %d of %s", m.bytes, link) }
func (r route) on(link string) string {
	return fmt.Sprintf("route %s", r) + either(r.index == 0, "", " on "+link)
}

func (r route) String() string {
	via := either(r.gateway.IsValid(), fmt.Sprintf(" via %s", r.gateway), "")
	table := either(r.table == unix.RT_TABLE_MAIN || r.table == 0, "", fmt.Sprintf(" table %d", r.table))
	return fmt.Sprintf("%s%s metric %d%s", r.network, via, r.metric, table)
}

func linkOf(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

func (a address) change(add bool) error {
	l, k := linkOf(a.index), &netlink.Addr{IPNet: ipNet(a.prefix)}
	if add && a.prefix.Addr().Is6() { // the kernel asks again for a new address only, not for one that another host had
		_ = netlink.AddrDel(l, k)
	}
	return either(add, netlink.AddrReplace, netlink.AddrDel)(l, k)
}

func (m member) change(add bool) error {
	l, to := linkOf(m.index), either(add, m.master, 0)
	if master, err := netlink.LinkByIndex(to); err == nil && master.Type() == "bond" {
		_ = netlink.LinkSetDown(l) // a bond takes no other
	}
	return netlink.LinkSetMasterByIndex(l, to)
}

func (v tagged) change(add bool) error {
	l, err := netlink.LinkByIndex(v.index)
	if err != nil {
		return err
	}
	bridge := l.Type() == "bridge"
	return either(add, netlink.BridgeVlanAdd, netlink.BridgeVlanDel)(l, uint16(v.vlan), false, false, bridge, !bridge)
}

func (a altname) change(add bool) error {
	return either(add, netlink.LinkAddAltName, netlink.LinkDelAltName)(linkOf(a.index), a.name)
}
func (r route) change(add bool) error {
	return either(add, netlink.RouteAdd, netlink.RouteDel)(r.kernel())
}
func (r rule) change(add bool) error {
	return either(add, netlink.RuleAdd, netlink.RuleDel)(r.kernel())
}

// change only sets it: another one replaces it.
func (m mtu) change(bool) error { return netlink.LinkSetMTU(linkOf(m.index), m.bytes) }

// either evaluates both.
func either[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

func (r route) kernel() *netlink.Route {
	return &netlink.Route{
		LinkIndex: r.index, Dst: ipNet(r.network), Priority: int(r.metric), Protocol: ours, Table: int(r.table), MTU: r.mtu,
		Type: r.kind, Gw: r.gateway.AsSlice(), Src: r.source.AsSlice(), Flags: either(r.onlink, int(netlink.FLAG_ONLINK), 0),
		Scope: either(!r.gateway.IsValid() && r.kind == unix.RTN_UNICAST, netlink.SCOPE_LINK, netlink.SCOPE_UNIVERSE),
	}
}

func (r rule) kernel() *netlink.Rule {
	k := netlink.NewRule()
	k.Priority, k.Table, k.Mark, k.Protocol, k.Family = int(r.priority), int(r.table), r.mark, ours, r.family
	k.Src, k.Dst = ipNet(r.from), ipNet(r.to)
	return k
}

// ipNet is nil for none.
func ipNet(p netip.Prefix) *net.IPNet {
	return either(p.IsValid(), &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, nil)
}

func prefixOf(n *net.IPNet) netip.Prefix {
	p, _ := netip.ParsePrefix(n.String()) // none for nil
	return p
}

// addrOf is none for one that isn't an address.
func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// actual is the state of the kernel: all MTUs, names and addresses, and the routes and rules that are ours or
// those of router advertisements.
type actual struct {
	// objects are true, except for addresses that another host has, by duplicate address detection (RFC 4862 §5.4):
	// these have to be added anew.
	objects map[object]bool
	// advertised are the addresses and routes that the kernel has made of router advertisements, in its order.
	advertised []want
	// tentative are addresses for which that detection isn't over: nothing can be sent from them yet.
	tentative map[address]bool
}

// dump calls list again if it was interrupted by a change, a few times.
func dump[T any](what string, list func() (T, error)) (all T, err error) {
	for range 5 {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		err = fmt.Errorf("list the %s: %w", what, err)
	}
	return all, err
}

func readKernel() (actual, error) {
	now := actual{objects: map[object]bool{}, tentative: map[address]bool{}}
	links, err1 := dump("links", netlink.LinkList)
	vlans, err2 := dump("VLANs of bridges", netlink.BridgeVlanList)
	addresses, err3 := dump("addresses", func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	routes, err4 := dump("routes", func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	rules, err5 := dump("rules", func() ([]netlink.Rule, error) { return netlink.RuleList(netlink.FAMILY_ALL) })
	if err := cmp.Or(err1, err2, err3, err4, err5); err != nil {
		return now, err
	}
	for _, l := range links {
		now.objects[mtu{l.Attrs().Index, l.Attrs().MTU}] = true
		now.objects[member{l.Attrs().Index, l.Attrs().MasterIndex}] = true
		for _, name := range l.Attrs().AltNames {
			now.objects[altname{l.Attrs().Index, name}] = true
		}
	}
	for index, all := range vlans {
		for _, v := range all {
			now.objects[tagged{int(index), int(v.Vid)}] = true
		}
	}
	for _, a := range addresses {
		own := address{a.LinkIndex, prefixOf(a.IPNet)}
		now.objects[own] = a.Flags&unix.IFA_F_DADFAILED == 0
		if a.Flags&unix.IFA_F_TENTATIVE != 0 && now.objects[own] {
			now.tentative[own] = true
		}
		const others = unix.IFA_F_DADFAILED | unix.IFA_F_PERMANENT | unix.IFA_F_DEPRECATED | unix.IFA_F_TEMPORARY
		if a.Flags&others == 0 && own.prefix.Addr().Is6() {
			now.advertised = append(now.advertised, want{own, byKernel})
		}
	}
	for _, k := range routes {
		switch {
		case k.Protocol == ours:
			now.objects[routeOf(k)] = true
		case k.Protocol == unix.RTPROT_RA:
			now.advertised = append(now.advertised, want{routeOf(k), byKernel})
		}
	}
	for _, k := range rules {
		if k.Protocol == ours {
			now.objects[rule{uint32(k.Priority), prefixOf(k.Src), prefixOf(k.Dst), k.Mark, uint32(k.Table), k.Family}] = true
		}
	}
	return now, nil
}

// routeOf is the kernel's route in our form. A gateway is onlink only if we said so: the kernel
// reports that of IPv4 only.
func routeOf(k netlink.Route) route {
	return route{
		index:   either(k.Type == unix.RTN_UNICAST, k.LinkIndex, 0), // IPv6 has the others on lo
		network: prefixOf(k.Dst), gateway: addrOf(k.Gw), source: addrOf(k.Src), onlink: k.Flags&int(netlink.FLAG_ONLINK) != 0,
		metric: uint32(k.Priority), table: uint32(k.Table), mtu: k.MTU, kind: k.Type,
	}
}

// rank is the order in which objects are added; they are removed in the reverse order. A route
// needs the addresses of its link, and the network of its gateway.
func rank(o object) int {
	switch o := o.(type) {
	case mtu, altname, tagged, member:
		return 0
	case address:
		return 1
	case rule:
		return 2
	case route:
		if !o.gateway.IsValid() {
			return 3
		}
	}
	return 4
}

// difference is what has to be removed from the kernel, and added to it, in that order. known
// are objects that networkd added: an address has no mark.
func difference(now map[object]bool, known map[object]bool, wanted []object) (remove, add []object) {
	for o := range now {
		_, mine := known[o]
		switch o.(type) {
		case mtu:
			continue
		case route, rule:
			mine = true // readKernel reads only those with our mark
		}
		if mine && !slices.Contains(wanted, o) {
			remove = append(remove, o)
		}
	}
	add = slices.DeleteFunc(slices.Clone(wanted), func(o object) bool { return now[o] })
	slices.SortFunc(remove, func(a, b object) int {
		return cmp.Or(rank(b)-rank(a), cmp.Compare(a.on(""), b.on("")))
	})
	slices.SortStableFunc(add, func(a, b object) int { return rank(a) - rank(b) })
	return remove, add
}

// LinkStatus is a link that networkd configures.
type LinkStatus struct {
	Index  int    `yaml:"index"`
	Kind   string `yaml:"kind" column:"KIND"` // device for a network card, else as ip-link(8) names it
	MAC    string `yaml:"mac,omitempty" column:"MAC"`
	Alias  string `yaml:"alias,omitempty" column:"ALIAS"` // its name in the configuration, if that is another
	MTU    int    `yaml:"mtu" column:"MTU"`               // bytes
	State  string `yaml:"state" column:"STATE"`           // up, no carrier, down
	Master string `yaml:"master,omitempty" column:"MASTER"`
	// what selects a card in the configuration: its permanent MAC address, its driver and its bus path
	Permanent string `yaml:"permanentMAC,omitempty"`
	Driver    string `yaml:"driver,omitempty"`
	BusPath   string `yaml:"busPath,omitempty"`
	// of a bond with LACP: the MAC address and the key of the switch; of its members: the state of the switch's port
	Partner string `yaml:"partner,omitempty" column:"PARTNER"`
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// Object is an address, a route or a rule that networkd wants.
type Object struct {
	Link    string `yaml:"link,omitempty" column:"LINK"`
	What    string `yaml:"what" column:"WHAT"`
	By      string `yaml:"by" column:"BY"` // who wants it
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// LeaseStatus is what a link was granted.
type LeaseStatus struct {
	Link      string         `yaml:"link" column:"LINK"`
	Source    string         `yaml:"source" column:"SOURCE"` // the name of its protocol
	Addresses []netip.Prefix `yaml:"addresses"`
	Server    string         `yaml:"server" column:"SERVER"` // that granted it
	Resolvers []netip.Addr   `yaml:"resolvers,omitempty"`
	Search    []string       `yaml:"search,omitempty"` // domains that complete short names
	Hostname  string         `yaml:"hostname,omitempty" column:"HOSTNAME"`
	Expires   time.Time      `yaml:"expires,omitempty"`                    // zero: never
	Problems  []string       `yaml:"problems,omitempty" column:"PROBLEMS"` // values that were left out
}

// The objects of networkd; their IDs are names of links, and of objects on them.
var (
	Links     = kindOf[LinkStatus]("Links", "Link")
	OnLinks   = kindOf[Object]("Addresses", "Address")
	Routes    = kindOf[Object]("Routes", "Route")
	Rules     = kindOf[Object]("Rules", "Rule")
	LeaseList = kindOf[LeaseStatus]("Leases", "Lease")
)

// reportObjects publishes them.
func (o *owner) reportObjects() error {
	w := o.o.Store.As(ID)
	links, leases := map[string]LinkStatus{}, map[string]LeaseStatus{}
	addresses, routes, rules := map[string]Object{}, map[string]Object{}, map[string]Object{}
	for _, p := range o.plans {
		if _, here := o.links[p.Name]; !here && !p.Ignore {
			s := LinkStatus{State: "missing", Problem: "waiting for " + o.lacksOf(p)[0].Error()}
			if err := o.errs[making+p.Name]; err != nil {
				s.Problem = err.Error()
			}
			links[p.Name] = s
		}
	}
	for _, name := range o.order() {
		links[name] = o.linkStatus(name)
		for _, l := range o.leases(name) {
			s := l.LeaseStatus
			s.Link, s.Expires, s.Problems = name, l.Expires.Round(0), o.problemsOf(l)
			s.Addresses = lists.Of(l.addresses, func(a leasedAddress) netip.Prefix { return a.Prefix })
			leases[name+"-"+l.Source] = s
		}
	}
	for _, want := range slices.Concat(o.wanted, o.state.advertised) {
		link := o.linkName(want.link())
		s := Object{Link: link, By: want.by, Problem: o.problem(want.object)}
		if want.by == byConfiguration {
			a, _ := want.object.(address)
			r, _ := want.object.(route)
			s.By = cmp.Or(o.cfg.EntryOf(a.prefix, config.Route{Network: r.network, Gateway: r.gateway}), byConfiguration)
		}
		switch w := want.object.(type) {
		case address:
			s.What = w.prefix.String()
			addresses[link+"-"+s.What] = s
		case route:
			s.What, s.Link = w.String(), either(w.index == 0, "", link)
			routes[strings.TrimPrefix(s.Link+"-"+s.What, "-")] = s
		case rule:
			s.Link, s.What = "", fmt.Sprintf("from %s to %s mark %d table %d", w.from, w.to, w.mark, w.table)
			s.What = strings.ReplaceAll(s.What, netip.Prefix{}.String(), "all")
			rules[strings.TrimPrefix(w.on(""), "rule ")] = s
		}
	}
	return errors.Join(Links.Replace(w, links), OnLinks.Replace(w, addresses), Routes.Replace(w, routes), Rules.Replace(w, rules), LeaseList.Replace(w, leases), WireGuardStatuses.Replace(w, o.tunnels))
}

func (o *owner) linkStatus(name string) LinkStatus {
	l := o.links[name]
	a := l.Attrs()
	s := LinkStatus{Index: a.Index, Kind: l.Type(), MAC: a.HardwareAddr.String(), MTU: a.MTU, State: "down", Alias: o.aliases[name], Partner: cmp.Or(partnerOf(name), partnerState(name))}
	if o.o.physical(l) {
		c := o.o.card(l)
		s.Permanent, s.Driver, s.BusPath = c.HardwareAddr, c.Driver, c.BusPath
	}
	if a.MasterIndex != 0 {
		s.Master = o.linkName(a.MasterIndex)
	}
	switch {
	case carrier(l):
		s.State = "up"
	case a.Flags&net.FlagUp != 0:
		s.State = "no carrier"
	}
	if err := errors.Join(o.errs[name], o.errs[making+name]); err != nil {
		s.Problem = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	if i := slices.IndexFunc(o.wanted, func(w want) bool { m, is := w.object.(mtu); return is && m.index == a.Index }); s.Problem == "" && i >= 0 {
		s.Problem = o.problem(o.wanted[i].object)
	}
	return s
}

// KernelName is what the kernel calls a link of the configuration, which may have an alias there.
func KernelName(r resource.Reader, called string) string {
	for _, l := range Links.List(r) {
		if called != "" && l.Spec.Alias == called {
			return l.ID
		}
	}
	return called
}
