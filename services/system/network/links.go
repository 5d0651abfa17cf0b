package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// virtual is a link that the configuration makes.
type virtual struct {
	name    string
	entry   config.Link // it has one kind, unless this is a VLAN
	vlan    config.VLAN // ID 0: it is none
	below   string      // the link that a VLAN or macvlan is on
	members []string    // of a bond, bridge or VRF
}

func (v virtual) kind() string { return v.link(0).Type() }

// sameLink reports whether one link can be both: other differences can be changed on it.
func (v virtual) sameLink(other virtual) bool {
	return v.below == other.below && reflect.DeepEqual(v.link(0), other.link(0))
}

// expand makes one plan for each link: VLANs, the far ends of veths, and members are inside of another link's entry in
// the configuration. A member of a bond or bridge has no addresses: its master has them. name is what the kernel calls
// a link of the configuration.
func expand(links []config.Link, name func(string) string) (plans []config.Link, virtuals []virtual, members map[string]string) {
	members = map[string]string{}
	tables, mtus := map[string]uint32{}, map[string]int{}
	add := func(p config.Link) {
		// else that has these settings, too
		if !slices.ContainsFunc(append(plans, links...), func(own config.Link) bool { return own.Name == p.Name }) {
			plans = append(plans, p)
		}
	}
	for _, l := range links {
		plans = append(plans, l)
		if l.Ignore {
			continue
		}
		if len(l.Kinds()) > 0 {
			v := virtual{name: l.Name, entry: l}
			if l.MACVLAN != nil {
				v.below = name(l.MACVLAN.Interface)
			}
			for _, called := range l.Members() {
				m := name(called)
				if v.members = append(v.members, m); l.VRF != nil {
					tables[m] = l.VRF.Table
				} else {
					members[m], mtus[m] = l.Name, l.MTU
				}
			}
			virtuals = append(virtuals, v)
		}
		if l.Veth != nil {
			add(config.Link{Name: l.Veth.Peer, MTU: l.MTU})
		}
		for _, v := range l.VLANs {
			// Linux gives a new VLAN the current MTU of its parent, which isn't set yet
			// at that time.
			own := virtual{name: config.VLANName(cmp.Or(l.Alias, l.Name), v.ID), vlan: v, below: l.Name}
			addresses := either(v.CIDR.IsValid(), []netip.Prefix{v.CIDR}, nil)
			add(config.Link{Name: own.name, MTU: cmp.Or(v.MTU, l.MTU), DHCP: v.DHCP, Addresses: addresses, Routes: v.Routes})
			virtuals = append(virtuals, own)
		}
	}
	for _, m := range slices.Sorted(maps.Keys(members)) {
		add(config.Link{Name: m})
	}
	for i, p := range plans {
		if members[p.Name] != "" {
			plans[i] = config.Link{Name: p.Name, MTU: cmp.Or(p.MTU, mtus[p.Name]), Ethernet: p.Ethernet}
		}
		plans[i].Table = tables[p.Name]
	}
	return plans, virtuals, members
}

var macvlanModes = map[string]netlink.MacvlanMode{
	"bridge": netlink.MACVLAN_MODE_BRIDGE, "private": netlink.MACVLAN_MODE_PRIVATE,
	"vepa": netlink.MACVLAN_MODE_VEPA, "passthru": netlink.MACVLAN_MODE_PASSTHRU,
}

// link is the new link in netlink's form, with all that can't be changed on it. below is the index of the link that it
// is on.
func (v virtual) link(below int) netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Group = v.name, below, ours
	switch e := v.entry; {
	case v.vlan.ID != 0:
		return &netlink.Vlan{LinkAttrs: attrs, VlanId: v.vlan.ID, VlanProtocol: netlink.StringToVlanProtocol(cmp.Or(v.vlan.Protocol, "802.1q"))}
	case e.Bond != nil:
		return bondLink(attrs, e.Bond)
	case e.Bridge != nil:
		return &netlink.Bridge{LinkAttrs: attrs}
	case e.VRF != nil:
		return &netlink.Vrf{LinkAttrs: attrs, Table: e.VRF.Table}
	case e.MACVLAN != nil:
		return &netlink.Macvlan{LinkAttrs: attrs, Mode: macvlanModes[e.MACVLAN.Mode]}
	case e.Veth != nil:
		return &netlink.Veth{LinkAttrs: attrs, PeerName: e.Veth.Peer}
	case e.Dummy:
		return &netlink.Dummy{LinkAttrs: attrs}
	}
	return &netlink.Wireguard{LinkAttrs: attrs}
}

// bondLink has only the options that are set, and that the mode uses: the kernel refuses others.
func bondLink(attrs netlink.LinkAttrs, o *config.Bond) netlink.Link {
	b := netlink.NewLinkBond(attrs)
	b.Mode = netlink.StringToBondMode(o.Mode)
	if b.Miimon, b.UpDelay, b.DownDelay = *o.MIIMon, o.UpDelay, o.DownDelay; o.ARPInterval != 0 {
		b.Miimon, b.UpDelay, b.DownDelay, b.ArpInterval = -1, -1, -1, o.ARPInterval
	}
	b.LacpRate = either(b.Mode == netlink.BOND_MODE_802_3AD, netlink.StringToBondLacpRate(o.LACPRate), b.LacpRate)
	hashes := slices.Contains([]netlink.BondMode{netlink.BOND_MODE_802_3AD, netlink.BOND_MODE_BALANCE_XOR, netlink.BOND_MODE_BALANCE_TLB}, b.Mode)
	b.XmitHashPolicy = either(hashes, netlink.StringToBondXmitHashPolicy(o.XmitHashPolicy), b.XmitHashPolicy)
	b.ArpIpTargets = lists.Of(o.ARPIPTarget, func(a netip.Addr) net.IP { return a.AsSlice() })
	chosen(&b.PrimaryReselect, netlink.StringToBondPrimaryReselectMap, o.PrimaryReselect)
	chosen(&b.FailOverMac, netlink.StringToBondFailOverMacMap, o.FailOverMAC)
	chosen(&b.AdSelect, netlink.StringToBondAdSelectMap, o.ADSelect)
	chosen(&b.ArpValidate, netlink.StringToBondArpValidateMap, o.ARPValidate)
	chosen(&b.ArpAllTargets, netlink.StringToBondArpAllTargetsMap, o.ARPAllTargets)
	b.AdActorSystem, _ = net.ParseMAC(o.ADActorSystem)
	for to, n := range map[*int]*int{
		&b.MinLinks: o.MinLinks, &b.AdActorSysPrio: o.ADActorSysPrio, &b.AdUserPortKey: o.ADUserPortKey, &b.LpInterval: o.LPInterval,
		&b.ResendIgmp: o.ResendIGMP, &b.NumPeerNotif: o.NumPeerNotif, &b.PacketsPerSlave: o.PacketsPerSlave,
	} {
		if n != nil {
			*to = *n
		}
	}
	for to, is := range map[*int]*bool{&b.AllSlavesActive: o.AllSlavesActive, &b.UseCarrier: o.UseCarrier, &b.TlbDynamicLb: o.TLBDynamicLB} {
		if is != nil {
			*to = map[bool]int{true: 1}[*is]
		}
	}
	return b
}

// chosen sets an option that is named.
func chosen[T any](option *T, by map[string]T, name string) {
	if value, known := by[name]; known {
		*option = value
	}
}

// build makes the virtual links: it removes those that aren't wanted, or
// differ, and makes those that are missing. The event of a new link calls it
// again.
func (o *owner) build(ctx context.Context) {
	for name, had := range o.made {
		if slices.ContainsFunc(o.virtuals, had.sameLink) {
			continue
		}
		err := o.unmake(name)
		if o.refused(making+name, err); err == nil {
			delete(o.made, name)
		}
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
	return o.look(true) // the kernel removes what is on top of a link with it, and both ends of a veth
}

func (o *owner) make(ctx context.Context, v virtual) error {
	_, made := o.made[v.name]
	l, here := o.links[v.name]
	if here && !made {
		if idle := v.entry.Bond != nil && l.Type() == "bond" && l.Attrs().Flags&net.FlagUp == 0; l.Attrs().Group != ours && !idle {
			return fmt.Errorf("%s is there already, as a %s of another program", v.name, l.Type())
		}
		// The module for bonds makes a bond0 of its own, which is down, when it is loaded. Ours is
		// made after the kernel has reported that the other is gone.
		return o.unmake(v.name)
	}
	if !here {
		return o.add(v)
	}
	o.made[v.name] = v
	o.lead(l, v)
	switch {
	case v.entry.WireGuard != nil:
		return o.key(ctx, l, v.entry.WireGuard)
	case v.entry.Bridge != nil:
		return configureBridge(v.name, v.entry.Bridge)
	case v.entry.Bond != nil:
		return o.adjust(l, v)
	}
	return nil
}

func (o *owner) add(v virtual) error {
	below := 0
	if v.below != "" {
		l := o.links[v.below]
		if l == nil {
			return nil // the node waits for it by its own name
		}
		below = l.Attrs().Index
	}
	err := netlink.LinkAdd(o.o.link(v, below))
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

// lead gives a bond or bridge the address of the first of its members that is here, before it has that one. A driver
// may find the first card after another one. Later the address stays, because others know the node by it.
func (o *owner) lead(master netlink.Link, v virtual) {
	has := func(name string) bool {
		l := o.links[name]
		return l != nil && l.Attrs().MasterIndex == master.Attrs().Index
	}
	i := slices.IndexFunc(v.members, func(name string) bool { return o.links[name] != nil })
	if v.entry.VRF != nil || i < 0 || has(v.members[i]) || o.settled && slices.ContainsFunc(v.members, has) {
		return
	}
	mac := o.links[v.members[i]].Attrs().HardwareAddr
	if err := netlink.LinkSetHardwareAddr(master, mac); err != nil {
		o.log.Warn(fmt.Sprintf("%s doesn't get the address of %s: %v", v.name, v.members[i], err))
		return
	}
	master.Attrs().HardwareAddr = mac
}

// adjust sets the primary of a bond, which has to be a member before, and options that another program has changed: as
// the kernel had them at first, because it rounds some.
func (o *owner) adjust(l netlink.Link, v virtual) error {
	// with an index it would be renamed
	is, change := l.(*netlink.Bond), netlink.NewLinkBond(netlink.LinkAttrs{Name: v.name})
	o.of(is.Index).bond = cmp.Or(o.of(is.Index).bond, is)
	want, first, now, to := reflect.ValueOf(v.link(0)).Elem(), reflect.ValueOf(o.of(is.Index).bond).Elem(), reflect.ValueOf(is).Elem(), reflect.ValueOf(change).Elem()
	var changed []string
	for i := range want.NumField() {
		if f := want.Field(i); f.CanInt() && f.Int() >= 0 && first.Field(i).Int() != now.Field(i).Int() {
			to.Field(i).Set(first.Field(i))
			changed = append(changed, want.Type().Field(i).Name)
		}
	}
	if len(changed) > 0 {
		o.log.Warn(fmt.Sprintf("%s of %s was changed by another program; it is set again", strings.Join(changed, ", "), v.name))
	}
	if i := slices.Index(v.entry.Bond.Interfaces, v.entry.Bond.Primary); i >= 0 {
		if p := o.links[v.members[i]]; p != nil && p.Attrs().MasterIndex == is.Index && p.Attrs().Index != is.Primary {
			change.Primary = p.Attrs().Index
		}
	}
	if len(changed) == 0 && change.Primary < 0 {
		return nil
	}
	if err := netlink.LinkModify(change); err != nil {
		return fmt.Errorf("set the options of %s: %w", v.name, err)
	}
	return nil
}

// configureBridge gives a bridge the settings that netlink's library doesn't have.
func configureBridge(name string, b *config.Bridge) error {
	set := func(file, what string, on bool) error {
		_, err := setting("/sys/class/net/"+name+"/bridge/"+file, map[bool]string{true: "1", false: "0"}[on])
		if err == nil || !on && errors.Is(err, fs.ErrNotExist) { // this kernel can't, and needn't
			return nil
		}
		return fmt.Errorf("%s of the bridge: %w", what, err)
	}
	return errors.Join(set("stp_state", "stp", b.STP.Enabled), set("vlan_filtering", "vlanFiltering", b.VLAN.VLANFiltering))
}
