package network

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
)

// publish writes files and resources, after everything is there and on each later change.
func (o *owner) publish() {
	all := o.candidates()
	addr, chosen := choose(all, o.pinned)
	if !o.settled {
		if lacking := o.lacking(all); len(lacking) > 0 {
			o.reportWaiting(lacking)
			return
		}
	}
	err := o.writeAll(addr, chosen)
	if o.refused("the node's names", err); err == nil && !o.settled {
		o.settled = true
		o.log.Info(fmt.Sprintf("node address %s: %s", addr.Primary, addr.Why))
		o.h.Started(fmt.Sprintf("node %s has address %s", o.name(), addr.Primary))
	}
}

func (o *owner) nameServers() ([]netip.Addr, []string) {
	return found(o, "nameservers", func(n config.Network) []netip.Addr { return n.Nameservers }, func(l *lease) []netip.Addr { return l.Resolvers })
}

// writeAll writes files and resources.
func (o *owner) writeAll(addr NodeAddress, chosen bool) error {
	w := o.o.Store.As(ID)
	servers, serversBy := o.nameServers()
	// domains that complete short names
	search, searchBy := found(o, "searchDomains", func(n config.Network) []string { return n.SearchDomains }, func(l *lease) []string { return l.Search })
	times, timesBy := found(o, "", nil, func(l *lease) []netip.Addr { return l.ntp })
	all := map[string]Object{}
	origins(all, "nameserver", servers, serversBy)
	origins(all, "searchdomain", search, searchBy)
	origins(all, "timeserver", times, timesBy)
	if len(servers) > config.MaxNameservers && !slices.Equal(servers, o.toldServers) {
		o.toldServers = servers
		o.log.Warn(fmt.Sprintf("there are %d name servers, and programs ask the first %d only: not %s", len(servers), config.MaxNameservers, servers[config.MaxNameservers]))
	}
	errs := []error{
		o.writeResolvers("/etc/resolv.conf", servers, search),
		o.writeResolvers(boot.PodResolvConf, []netip.Addr{o.cfg.ResolverAddress()}, search),
		Resolvers.Put(w, ResolversID, servers),
		TimeServers.Put(w, TimeServersID, times),
		Servers.Replace(w, all),
	}
	if !chosen {
		return errors.Join(errs...) // the last address stays published: its users need one
	}
	if o.pinned.IsValid() && o.pinned != addr.Primary {
		o.log.Warn(fmt.Sprintf("the node's address changes from %s to %s: %s", o.pinned, addr.Primary, addr.Why))
	}
	o.pinned = addr.Primary
	name := o.name()
	return errors.Join(append(errs,
		o.pin(name),
		o.writeNames(name, addr.Primary, o.settings.ExtraHostEntries),
		Hostnames.Put(w, HostnameID, name),
		Addresses.Put(w, AddressID, addr),
	)...)
}

// pin keeps the node's address and name, and the cards of entries, for later boots.
func (o *owner) pin(name string) error {
	if !o.configured || o.savedAddr == o.pinned && o.savedName == name && maps.Equal(o.savedCards, o.cards) || !o.o.pinReady() {
		return nil
	}
	cards, err := json.Marshal(o.cards)
	err = errors.Join(err, keep(o.o.pinFile, o.pinned.String()), keep(besides(o.o.pinFile, "node-name"), name),
		keep(besides(o.o.pinFile, "node-cards.json"), string(cards)))
	if err == nil {
		o.savedAddr, o.savedName, o.savedCards = o.pinned, name, maps.Clone(o.cards)
	}
	return err
}

// recall has what earlier boots have kept. STATE is mounted, as there is a configuration.
func (o *owner) recall() {
	addr, err1 := boot.Kept(o.o.pinFile, netip.ParseAddr)
	name, err2 := boot.Kept(besides(o.o.pinFile, "node-name"), cleanHostname)
	cards, err3 := boot.Kept(besides(o.o.pinFile, "node-cards.json"), func(text string) (cards map[string]string, err error) {
		return cards, json.Unmarshal([]byte(text), &cards)
	})
	if err := errors.Join(err1, err2, err3); err != nil {
		o.log.Warn("the address, the name or the cards of earlier boots are unknown: " + err.Error())
	}
	o.savedAddr, o.pinned, o.savedName, o.hostname, o.savedCards = addr, addr, name, name, cards
	maps.Copy(o.cards, cards)
}

// name is the configured one, or else that of an earlier boot, or else the first valid one of a
// lease, or else made from the first MAC address. It doesn't change once chosen, because the
// cluster identifies the node by it.
func (o *owner) name() string {
	if name := o.settings.Hostname; name != "" {
		return name
	}
	names, _ := found(o, "", nil, func(l *lease) []string {
		if name, err := cleanHostname(l.Hostname); err == nil {
			return []string{name}
		}
		return nil
	})
	if o.hostname == "" && len(names) > 0 && o.namedByLeases() {
		o.hostname = names[0]
	}
	for _, name := range o.order() {
		if mac := o.links[name].Attrs().HardwareAddr; o.hostname == "" && len(mac) > 0 && name != "lo" {
			o.hostname = hostnameFromMAC(mac)
		}
	}
	return cmp.Or(o.hostname, "garboard")
}

func (o *owner) namedByLeases() bool {
	n := o.settings
	return n.Hostname == "" && n.AutoHostname != config.HostnameStable
}

// problemsOf are the values of a lease that can't be used, and its name if the node has another one.
func (o *owner) problemsOf(l *lease) []string {
	name, err := cleanHostname(l.Hostname)
	if l.Hostname == "" || o.hostname == "" || name == o.hostname || !o.namedByLeases() {
		return l.Problems
	}
	why := either(err == nil, "a node keeps the name that it has in its cluster; machine.network.hostname changes it", fmt.Sprint(err))
	return append(slices.Clip(l.Problems), fmt.Sprintf("the name %q isn't used: the node is %s, and %s", l.Hostname, o.hostname, why))
}

// found is what the first layer of settings has that has any, else what all leases have; and who wants each. field is
// its name in the configuration.
func found[E comparable](o *owner, field string, settings func(config.Network) []E, leases func(*lease) []E) (out []E, by []string) {
	for _, l := range o.layers() {
		if settings != nil && len(settings(l.Network)) > 0 {
			for i := range settings(l.Network) {
				by = append(by, either(l.by == byConfiguration, fmt.Sprintf("machine.network.%s[%d]", field, i), l.by))
			}
			return settings(l.Network), by
		}
	}
	out = []E{}
	for _, name := range o.order() {
		for _, l := range o.leases(name) {
			more := missing(leases(l), out)
			out, by = append(out, more...), append(by, slices.Repeat([]string{l.by()}, len(more))...)
		}
	}
	return out, by
}

// origins says of each value who wants it.
func origins[E any](all map[string]Object, what string, values []E, by []string) {
	for i, value := range values {
		all[fmt.Sprint(what, "-", value)] = Object{What: fmt.Sprint(value), By: by[i]}
	}
}

// missing is what is in a and not in b.
func missing[E comparable](a, b []E) []E {
	return slices.DeleteFunc(slices.Clone(a), func(e E) bool { return slices.Contains(b, e) })
}

// report publishes the progress, and logs each new problem, unless others change something all the time.
func (o *owner) report() error {
	s := Status{Config: o.version, Problems: o.problems()}
	s.Addresses = lists.Some(o.present(), func(w want) (netip.Prefix, bool) { a, is := w.object.(address); return a.prefix, is })
	if o.spent <= maxAtOnce {
		for _, p := range missing(s.Problems, o.logged) {
			o.log.Warn(p)
		}
		o.logged = s.Problems
	}
	return errors.Join(Statuses.Put(o.o.Store.As(ID), ID, s), o.reportObjects())
}

// candidate is a possible address of the node.
type candidate struct {
	prefix netip.Prefix
	link   string
	// metric of the link's default route; noDefault where it has none.
	metric uint32
}

const noDefault = ^uint32(0)

// eligible reports whether an address can be the node's.
func eligible(a netip.Addr, valid []netip.Prefix) bool {
	allowed := len(valid) == 0 || slices.ContainsFunc(valid, func(v netip.Prefix) bool { return v.Contains(a) })
	return allowed && a.IsGlobalUnicast() // others, such as link-local ones, can't be reached from other nodes
}

// present are the wanted objects that are there, then those of router advertisements.
func (o *owner) present() []want {
	there := slices.DeleteFunc(slices.Clone(o.wanted), func(w want) bool { return !o.state.objects[w.object] })
	return append(there, o.state.advertised...)
}

// candidates are those of all links.
func (o *owner) candidates() (out []candidate) {
	for _, name := range o.order() {
		p, _ := o.plan(o.links[name])
		if p.Table != 0 {
			continue // in a VRF, where the cluster isn't
		}
		index, metric, first := o.links[name].Attrs().Index, noDefault, len(out)
		for _, w := range o.present() {
			switch w := w.object.(type) {
			case route:
				if w.index == index && w.network.Bits() == 0 && w.table == unix.RT_TABLE_MAIN {
					metric = min(metric, w.metric)
				}
			case address:
				if w.index == index && !o.state.tentative[w] && eligible(w.prefix.Addr(), o.cfg.Machine.Kubelet.NodeIP.ValidSubnets) {
					out = append(out, candidate{prefix: w.prefix, link: name})
				}
			}
		}
		for i := range out[first:] {
			out[first+i].metric = metric
		}
	}
	return out
}

// choose selects the node's address by one rule: the link with the default
// route of the lowest metric, IPv4 before IPv6, the first address of the link.
// The address of an earlier boot is kept as long as the node has it.
func choose(all []candidate, pinned netip.Addr) (NodeAddress, bool) {
	if len(all) == 0 {
		return NodeAddress{}, false
	}
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.metric, b.metric), cmp.Compare(a.prefix.Addr().BitLen(), b.prefix.Addr().BitLen()))
	})
	n := NodeAddress{Primary: sorted[0].prefix.Addr(), Why: why(sorted)}
	for _, c := range sorted {
		n.All = append(n.All, c.prefix)
		if c.prefix.Addr() == pinned && pinned != n.Primary {
			n.Primary = pinned
			n.Why = fmt.Sprintf("on %s; chosen earlier and still there (by the rule it would be %s: %s)", c.link, sorted[0].prefix.Addr(), n.Why)
		}
	}
	return n, true
}

func why(sorted []candidate) string {
	c := sorted[0]
	family := map[int]string{32: "IPv4", 128: "IPv6"}[c.prefix.Addr().BitLen()]
	switch {
	case len(sorted) == 1:
		return "the only address, on " + c.link
	case c.metric == noDefault:
		return fmt.Sprintf("the first %s address, on %s; no link has a default route", family, c.link)
	}
	return fmt.Sprintf("the first %s address of %s, which has the default route with the lowest metric (%d)", family, c.link, c.metric)
}

// besides is a file beside that of the node's address.
func besides(pinFile, name string) string { return filepath.Join(filepath.Dir(pinFile), name) }

func keep(file, text string) error { return boot.WriteFile(file, []byte(text+"\n"), 0o644) }

// cleanHostname is name as the name of a node. Of a name that is too long, its first label is
// enough. Every machine calls itself localhost.
func cleanHostname(name string) (string, error) {
	clean := strings.ToLower(strings.TrimSuffix(strings.TrimRight(name, "\x00"), "."))
	label, _, _ := strings.Cut(clean, ".")
	clean = either(len(clean) > config.MaxHostname, label, clean)
	switch {
	case label == "localhost":
		return "", fmt.Errorf("%q is every machine's own name", name)
	case len(clean) > config.MaxHostname:
		return "", fmt.Errorf("%q is longer than the %d bytes that Linux allows", name, config.MaxHostname)
	case !config.IsDNSName(clean):
		return "", fmt.Errorf("%q isn't a DNS name of lower-case letters, digits, dashes and dots (RFC 1123)", name)
	}
	return clean, nil
}

// cleanDomain is a domain as a search domain, or "" if it isn't one.
func cleanDomain(domain string) string {
	domain = strings.ToLower(strings.TrimSuffix(strings.TrimSpace(domain), "."))
	return either(config.IsDNSName(domain), domain, "")
}

// maxFile is more than any of the files can have.
const maxFile = 1 << 16

// hostnameFromMAC is the name of a node without a configured one: the same at each boot.
func hostnameFromMAC(mac net.HardwareAddr) string {
	return fmt.Sprintf("garboard-%x", []byte(mac))
}

// write changes a file of /etc that has another content, whoever has written that.
func (o *owner) write(name, content string) error {
	path := filepath.Join(o.o.etcDir, name)
	if old, err := untrusted.ReadFile(path, maxFile); err == nil && string(old) == content {
		return nil
	}
	return replace(path, content)
}

// replace changes a file in place: the kubelet's container has the file itself mounted,
// and would keep the old one after a rename. For a short time the end of a longer old
// content follows the new one; after a power cut /etc is made again in any case.
func replace(path, content string) error {
	f, err := untrusted.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt([]byte(content), 0); err == nil {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}

// writeNames sets the kernel's host name and writes /etc/hostname and /etc/hosts.
func (o *owner) writeNames(hostname string, node netip.Addr, entries []config.HostEntry) error {
	if now, err := os.Hostname(); err != nil || now != hostname {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return fmt.Errorf("set host name to %s: %w", hostname, err)
		}
	}
	return errors.Join(o.write("hostname", hostname+"\n"), o.write("hosts", hosts(hostname, node, entries)))
}

func hosts(hostname string, node netip.Addr, entries []config.HostEntry) string {
	own := either(node.IsValid(), node.String(), "127.0.1.1") // the node's own name always resolves
	if short, _, dotted := strings.Cut(hostname, "."); dotted {
		hostname += " " + short
	}
	text := "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + own + " " + hostname + "\n"
	for _, e := range entries {
		text += e.IP.String() + " " + strings.Join(e.Aliases, " ") + "\n"
	}
	return text
}

func (o *owner) writeResolvers(path string, servers []netip.Addr, search []string) error {
	text := ""
	for _, s := range servers[:min(len(servers), config.MaxNameservers)] {
		text += "nameserver " + s.String() + "\n"
	}
	if len(search) > 0 {
		text += "search " + strings.Join(search, " ") + "\n"
	}
	return o.write(filepath.Base(path), text)
}
