package network

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
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

func (o *owner) nameServers() []netip.Addr {
	return found(o, func(n config.Network) []netip.Addr { return n.Nameservers }, func(l *lease) []netip.Addr { return l.Resolvers })
}

// writeAll writes files and resources.
func (o *owner) writeAll(addr NodeAddress, chosen bool) error {
	w := o.o.Store.As(ID)
	servers := o.nameServers()
	// domains that complete short names
	search := found(o, func(n config.Network) []string { return n.SearchDomains }, func(l *lease) []string { return l.Search })
	if len(servers) > config.MaxNameservers && !slices.Equal(servers, o.toldServers) {
		o.toldServers = servers
		o.log.Warn(fmt.Sprintf("there are %d name servers, and programs ask the first %d only: not %s", len(servers), config.MaxNameservers, servers[config.MaxNameservers]))
	}
	errs := []error{
		o.writeResolvers("/etc/resolv.conf", servers, search),
		o.writeResolvers(boot.PodResolvConf, []netip.Addr{o.cfg.ResolverAddress()}, search),
		Resolvers.Put(w, ResolversID, servers),
		TimeServers.Put(w, TimeServersID, found(o, nil, func(l *lease) []netip.Addr { return l.ntp })),
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

// pin keeps the node's address and name for later boots.
func (o *owner) pin(name string) error {
	if !o.configured || o.savedAddr == o.pinned && o.savedName == name || !o.o.pinReady() {
		return nil
	}
	err := errors.Join(keep(o.o.pinFile, o.pinned.String()), keep(nameFile(o.o.pinFile), name))
	if err == nil {
		o.savedAddr, o.savedName = o.pinned, name
	}
	return err
}

// name is the configured one, or else that of an earlier boot, or else the first valid one of a
// lease, or else made from the first MAC address. It doesn't change once chosen, because the
// cluster identifies the node by it.
func (o *owner) name() string {
	if name := o.settings.Hostname; name != "" {
		return name
	}
	names := found(o, nil, func(l *lease) []string {
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
	why := "a node keeps the name that it has in its cluster; machine.network.hostname changes it"
	if err != nil {
		why = err.Error()
	}
	return append(slices.Clip(l.Problems), fmt.Sprintf("the name %q isn't used: the node is %s, and %s", l.Hostname, o.hostname, why))
}

// found is what the first layer of settings has that has any, else what all leases have.
func found[E comparable](o *owner, settings func(config.Network) []E, leases func(*lease) []E) []E {
	for _, l := range o.layers() {
		if settings != nil && len(settings(l.Network)) > 0 {
			return settings(l.Network)
		}
	}
	out := []E{}
	for _, name := range o.order() {
		for _, l := range o.leases(name) {
			out = append(out, missing(leases(l), out)...)
		}
	}
	return out
}

// missing is what is in a and not in b.
func missing[E comparable](a, b []E) []E {
	return slices.DeleteFunc(slices.Clone(a), func(e E) bool { return slices.Contains(b, e) })
}

// report publishes the progress, and logs each new problem, unless others change something all the time.
func (o *owner) report() error {
	s := Status{Config: o.version, Problems: o.problems()}
	for _, w := range o.present() {
		if a, is := w.object.(address); is {
			s.Addresses = append(s.Addresses, a.prefix)
		}
	}
	if o.spent <= maxAtOnce {
		for _, p := range missing(s.Problems, o.logged) {
			o.log.Warn(p)
		}
		o.logged = s.Problems
	}
	return errors.Join(Statuses.Put(o.o.Store.As(ID), ID, s), o.reportObjects())
}
