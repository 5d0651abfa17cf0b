package network

import (
	"errors"
	"fmt"
	"net/netip"
)

// namesKey is the key for errors of the node's names, among those of its links:
// no link has this name.
const namesKey = "the node's names"

// publish writes files and resources, after everything is there and on each later change.
func (o *owner) publish(all []candidate) {
	lacking := o.lacking()
	addr, chosen := choose(all, o.pinned)
	if !o.settled {
		if len(lacking) == 0 && !chosen {
			lacking = []error{lack(NoValidSubnet, "an address that machine.kubelet.nodeIP.validSubnets allows")}
		}
		if len(lacking) > 0 {
			o.reportWaiting(lacking)
			return
		}
	}
	if err := o.writeAll(addr, chosen); err != nil {
		o.log.Warn(err.Error() + "; trying again")
		o.errs[namesKey] = err
		return
	}
	delete(o.errs, namesKey)
	if !o.settled {
		o.settled = true
		o.log.Info(fmt.Sprintf("node address %s: %s", addr.Primary, addr.Why))
		o.h.Started(fmt.Sprintf("node %s has address %s", o.name(), addr.Primary))
	}
}

// writeAll writes files and resources.
func (o *owner) writeAll(addr NodeAddress, chosen bool) error {
	w := o.o.Store.As(ID)
	errs := []error{
		o.files.resolvers(o.resolvers()),
		Resolvers.Put(w, ResolversID, o.resolvers()),
		TimeServers.Put(w, TimeServersID, o.timeServers()),
	}
	if !chosen {
		// The last address stays published: its users need one.
		if !o.warnedNoAddress {
			o.warnedNoAddress = true
			o.log.Warn("the node has no address at the moment")
		}
		return errors.Join(errs...)
	}
	o.warnedNoAddress = false
	if o.pinned.IsValid() && o.pinned != addr.Primary {
		o.log.Warn(fmt.Sprintf("the node's address changes from %s to %s: %s", o.pinned, addr.Primary, addr.Why))
		o.pinSaved = false
	}
	o.pinned = addr.Primary
	if o.configured && !o.pinSaved && o.o.pinReady() {
		err := writePin(o.o.pinFile, o.pinned)
		o.pinSaved = err == nil
		errs = append(errs, err)
	}
	return errors.Join(append(errs,
		o.files.names(o.name(), addr.Primary),
		Hostnames.Put(w, HostnameID, o.name()),
		Addresses.Put(w, AddressID, addr),
	)...)
}

// name is the configured one, or else the first lease's, or else made from the first MAC
// address. It doesn't change once chosen, because the cluster identifies the node by it.
func (o *owner) name() string {
	if name := o.cfg.Machine.Network.Hostname; name != "" {
		return name
	}
	if o.hostname != "" {
		return o.hostname
	}
	for _, name := range o.order() {
		for _, l := range o.leases(name) {
			if o.hostname = cleanHostname(l.hostname); o.hostname != "" {
				return o.hostname
			}
		}
	}
	for _, name := range o.order() {
		if _, ours := o.applied[name]; ours && len(o.links[name].Attrs().HardwareAddr) > 0 && name != "lo" {
			o.hostname = hostnameFromMAC(o.links[name].Attrs().HardwareAddr)
			return o.hostname
		}
	}
	return "garboard"
}

func (o *owner) resolvers() []netip.Addr {
	if ns := o.cfg.Machine.Network.Nameservers; len(ns) > 0 {
		return ns
	}
	return o.fromLeases(func(l *lease) []netip.Addr { return l.resolvers })
}

func (o *owner) timeServers() []netip.Addr {
	return o.fromLeases(func(l *lease) []netip.Addr { return l.ntp })
}

func (o *owner) fromLeases(what func(*lease) []netip.Addr) []netip.Addr {
	out := []netip.Addr{}
	for _, name := range o.order() {
		for _, l := range o.leases(name) {
			out = append(out, missing(what(l), out)...)
		}
	}
	return out
}
