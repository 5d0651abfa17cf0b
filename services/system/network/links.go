package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// virtual is a link that the configuration makes: exactly one of bond, vlan and
// wireguard.
type virtual struct {
	name      string
	bond      *config.Bond
	vlan      *tag
	wireguard *config.WireGuard
}

// tag is the parent and the ID of a VLAN.
type tag struct {
	parent string
	id     int
}

func (v virtual) kind() string {
	switch {
	case v.bond != nil:
		return "bond"
	case v.vlan != nil:
		return "vlan"
	}
	return "wireguard"
}

// sameLink reports whether one link can be both: other differences can be changed on it.
func (v virtual) sameLink(other virtual) bool {
	if v.bond != nil && other.bond != nil {
		a, b := *v.bond, *other.bond
		a.Interfaces, b.Interfaces = nil, nil
		return reflect.DeepEqual(a, b)
	}
	return v.kind() == other.kind() && reflect.DeepEqual(v.vlan, other.vlan)
}

// expand makes one plan for each link: VLANs and the members of bonds are
// inside of another link's entry in the configuration. A member has no
// addresses: the bond has them. Bonds come before the links on top of them.
func expand(links []config.Link) (plans []config.Link, virtuals []virtual, members map[string]string) {
	members = map[string]string{}
	for _, l := range links {
		if l.Ignore || l.Bond == nil {
			continue
		}
		virtuals = append(virtuals, virtual{name: l.Name, bond: l.Bond})
		for _, m := range l.Bond.Interfaces {
			members[m] = l.Name
		}
	}
	for _, l := range links {
		if members[l.Name] != "" {
			continue
		}
		plans = append(plans, l)
		if l.Ignore {
			continue
		}
		if l.WireGuard != nil {
			virtuals = append(virtuals, virtual{name: l.Name, wireguard: l.WireGuard})
		}
		for _, v := range l.VLANs {
			// Linux gives a new VLAN the current MTU of its parent, which isn't set yet
			// at that time.
			p := config.Link{Name: config.VLANName(l.Name, v.ID), MTU: cmp.Or(v.MTU, l.MTU), DHCP: v.DHCP, Routes: v.Routes}
			if v.CIDR.IsValid() {
				p.Addresses = []netip.Prefix{v.CIDR}
			}
			if !slices.ContainsFunc(links, func(own config.Link) bool { return own.Name == p.Name }) { // else that has the VLAN's settings, too
				plans = append(plans, p)
			}
			virtuals = append(virtuals, virtual{name: p.Name, vlan: &tag{l.Name, v.ID}})
		}
	}
	for _, m := range slices.Sorted(maps.Keys(members)) {
		plans = append(plans, config.Link{Name: m})
	}
	return plans, virtuals, members
}

// link is the new link in netlink's form; only VLANs need the parent's index.
func (v virtual) link(parent int) netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = v.name
	switch {
	case v.vlan != nil:
		attrs.ParentIndex = parent
		return &netlink.Vlan{LinkAttrs: attrs, VlanId: v.vlan.id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
	case v.wireguard != nil:
		return &netlink.Wireguard{LinkAttrs: attrs}
	}
	// The kernel refuses options that the mode doesn't use.
	b := netlink.NewLinkBond(attrs)
	b.Mode = netlink.StringToBondMode(v.bond.Mode)
	b.Miimon, b.UpDelay, b.DownDelay = *v.bond.MIIMon, v.bond.UpDelay, v.bond.DownDelay
	switch b.Mode {
	case netlink.BOND_MODE_802_3AD:
		b.LacpRate = netlink.StringToBondLacpRate(v.bond.LACPRate)
		b.XmitHashPolicy = netlink.StringToBondXmitHashPolicy(v.bond.XmitHashPolicy)
	case netlink.BOND_MODE_BALANCE_XOR, netlink.BOND_MODE_BALANCE_TLB:
		b.XmitHashPolicy = netlink.StringToBondXmitHashPolicy(v.bond.XmitHashPolicy)
	}
	return b
}

// build makes the virtual links: it removes those that aren't wanted, or
// differ, and makes those that are missing. The event of a new link calls it
// again.
func (o *owner) build(ctx context.Context) {
	wanted := map[string]virtual{}
	for _, v := range o.virtuals {
		wanted[v.name] = v
	}
	for name, had := range o.made {
		if v, still := wanted[name]; still && v.sameLink(had) {
			continue
		}
		if err := o.unmake(name); err != nil {
			o.refused(making+name, err)
			continue
		}
		delete(o.made, name)
	}
	for _, v := range o.virtuals {
		o.refused(making+v.name, o.make(ctx, v))
	}
}

// making distinguishes errors of making a link from errors of its addresses.
const making = "make "

func (o *owner) unmake(name string) error {
	l := o.links[name]
	if l == nil {
		return nil
	}
	err := netlink.LinkDel(l)
	if err != nil && !errors.Is(err, unix.ENODEV) && !errors.As(err, new(netlink.LinkNotFoundError)) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	o.drop(l)
	// The kernel removes the VLANs of a link with it.
	for _, other := range o.links {
		if other.Type() == "vlan" && other.Attrs().ParentIndex == l.Attrs().Index {
			o.drop(other)
		}
	}
	return nil
}

// drop forgets a link that was removed: it must not be used any more, and
// events that are still queued are older than the removal.
func (o *owner) drop(l netlink.Link) {
	name := l.Attrs().Name
	o.gone[l.Attrs().Index] = true
	delete(o.links, name)
	delete(o.keyed, name)
	o.dropped(l.Attrs().Index, true)
}

func (o *owner) make(ctx context.Context, v virtual) error {
	_, ours := o.made[v.name]
	l, here := o.links[v.name]
	if here && !ours {
		if l.Type() != o.o.link(v, 0).Type() {
			return fmt.Errorf("%s is there already, as a %s of another program", v.name, l.Type())
		}
		// The module for bonds makes a bond0 of its own when it is loaded. Ours is
		// made after the kernel has reported that the other is gone.
		return o.unmake(v.name)
	}
	if !here {
		return o.add(v)
	}
	o.made[v.name] = v
	switch {
	case v.bond != nil:
		return o.enslave(l, v.bond.Interfaces)
	case v.wireguard != nil:
		return o.key(ctx, l, v.wireguard)
	}
	return nil
}

func (o *owner) add(v virtual) error {
	parent := 0
	if v.vlan != nil {
		l := o.links[v.vlan.parent]
		if l == nil {
			return nil // the node waits for it by its own name
		}
		parent = l.Attrs().Index
	}
	made := o.o.link(v, parent)
	if v.bond != nil {
		made.Attrs().HardwareAddr = firstAddress(v.bond.Interfaces)
	}
	err := netlink.LinkAdd(made)
	if errors.Is(err, unix.EEXIST) {
		// It was made just now, by us or by the module for bonds, which the kernel
		// has loaded for this call. The next event shows which of them.
		return nil
	}
	if err != nil {
		return fmt.Errorf("make the %s %s: %w", v.kind(), v.name, err)
	}
	o.made[v.name] = v
	return nil
}

// firstAddress is the address of the first link that is there. The kernel is asked: a link
// that was a member of another bond has its own address again.
func firstAddress(links []string) net.HardwareAddr {
	for _, name := range links {
		if l, err := netlink.LinkByName(name); err == nil {
			return l.Attrs().HardwareAddr
		}
	}
	return nil
}

// enslave makes the listed links the bond's members, in the order of the list: Linux gives a
// bond without an address that of its first one. Linux adds only a link that is down, so a
// link that is a member already isn't changed.
func (o *owner) enslave(bond netlink.Link, members []string) error {
	index := bond.Attrs().Index
	var errs []error
	for name := range o.slaves {
		l, err := netlink.LinkByName(name) // events may be late
		if err != nil || slices.Contains(members, name) || o.slaves[name] != [2]int{index, l.Attrs().Index} {
			continue
		}
		if l.Attrs().MasterIndex != index {
			delete(o.slaves, name)
			continue
		}
		if err := netlink.LinkSetNoMaster(l); err != nil {
			errs = append(errs, fmt.Errorf("take %s out of %s: %w", name, bond.Attrs().Name, err))
			continue
		}
		delete(o.slaves, name)
	}
	for i, name := range members {
		l, err := netlink.LinkByName(name)
		if err != nil || l.Attrs().MasterIndex == index {
			continue
		}
		if o.slaves[name] == [2]int{index, l.Attrs().Index} {
			o.log.Warn(fmt.Sprintf("%s was taken out of %s by another program; it is a member again", name, bond.Attrs().Name))
		}
		// A driver may have found the first card after another one. Later the address stays,
		// because others know the node by it.
		if mac := l.Attrs().HardwareAddr; i == 0 && !o.settled && !bytes.Equal(mac, bond.Attrs().HardwareAddr) {
			if err := netlink.LinkSetHardwareAddr(bond, mac); err != nil {
				o.log.Warn(fmt.Sprintf("%s doesn't get the address of %s: %v", bond.Attrs().Name, name, err))
			}
		}
		if err = netlink.LinkSetDown(l); err == nil {
			err = netlink.LinkSetMaster(l, bond)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("take %s into %s: %w", name, bond.Attrs().Name, err))
			continue
		}
		o.slaves[name] = [2]int{index, l.Attrs().Index}
	}
	return errors.Join(errs...)
}
