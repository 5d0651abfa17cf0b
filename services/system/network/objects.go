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

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

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
	// of a bond with LACP: the MAC address and the key of the switch
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
			s.What = w.String()
			if w.index == 0 {
				s.Link = ""
			}
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
	s := LinkStatus{Index: a.Index, Kind: l.Type(), MAC: a.HardwareAddr.String(), MTU: a.MTU, State: "down", Alias: o.aliases[name], Partner: partnerOf(name)}
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
