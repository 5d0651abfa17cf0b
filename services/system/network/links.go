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
	"os"
	"reflect"
	"slices"
	"strconv"
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
	return v.below == other.below && reflect.DeepEqual(v.link(0), other.link(0)) && (v.entry.Bond == nil || maps.Equal(v.files(), other.files()))
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

// bondLink has what the other options depend on, and what can be a list: files are for all others.
func bondLink(attrs netlink.LinkAttrs, o *config.Bond) netlink.Link {
	b := netlink.NewLinkBond(attrs)
	b.Mode, b.Miimon = netlink.StringToBondMode(o.Mode), *o.MIIMon
	if o.ARPInterval != 0 {
		b.Miimon, b.ArpInterval = -1, o.ARPInterval
	}
	b.ArpIpTargets = lists.Of(o.ARPIPTarget, func(a netip.Addr) net.IP { return a.AsSlice() })
	return b
}

// files are the settings of a bond or bridge that are set by files of the link: netlink's library doesn't have all, and
// all can be compared here. Each has a word of what the kernel shows there.
func (v virtual) files() map[string]string {
	files, flag := map[string]string{}, map[bool]string{true: "1", false: "0"}
	if b := v.entry.Bridge; b != nil {
		files["bridge/stp_state"], files["bridge/vlan_filtering"] = flag[b.STP.Enabled], flag[b.VLAN.VLANFiltering]
	}
	if v.entry.Bond == nil {
		return files
	}
	for f, value := range reflect.ValueOf(*v.entry.Bond).Fields() {
		file := f.Tag.Get("file")
		if file == "" || value.IsZero() {
			continue
		}
		if files["bonding/"+file] = fmt.Sprint(reflect.Indirect(value)); reflect.Indirect(value).Kind() == reflect.Bool {
			files["bonding/"+file] = flag[reflect.Indirect(value).Bool()]
		}
	}
	// The kernel refuses some with some modes, and delays without miimon.
	maps.DeleteFunc(files, func(file, _ string) bool {
		return file == "bonding/lacp_rate" && v.entry.Bond.Mode != "802.3ad" || strings.HasSuffix(file, "delay") && v.entry.Bond.ARPInterval != 0
	})
	return files
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
	if v.entry.WireGuard != nil {
		return o.key(ctx, l, v.entry.WireGuard)
	}
	return o.setFiles(l, v)
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

// portStates are the bits of the state of a port with LACP (IEEE 802.1AX §6.4.2.3), as ip-link(8) names them.
var portStates = []string{"active", "short_timeout", "aggregating", "in_sync", "collecting", "distributing", "defaulted", "expired"}

// partnerState is the state of the other end's port, as a member of a bond with LACP has heard it; "" for other links.
func partnerState(member string) string {
	text, _ := os.ReadFile("/sys/class/net/" + member + "/bonding_slave/ad_partner_oper_port_state")
	bits, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 8) // N/A in other modes
	var states []string
	for i, state := range portStates {
		if bits&(1<<i) != 0 {
			states = append(states, state)
		}
	}
	return strings.Join(states, ",")
}

// setFiles writes the files of a bond or bridge that have something else: those of a bond before it is up and has
// members, because some can't change later. Its primary has to be a member before.
func (o *owner) setFiles(l netlink.Link, v virtual) (err error) {
	files := v.files()
	if b := v.entry.Bond; b != nil && slices.Contains(b.Interfaces, b.Primary) {
		primary := v.members[slices.Index(b.Interfaces, b.Primary)]
		if p := o.links[primary]; p != nil && p.Attrs().MasterIndex == l.Attrs().Index {
			files["bonding/primary"] = primary
		}
	}
	for _, file := range slices.Sorted(maps.Keys(files)) {
		path := "/sys/class/net/" + v.name + "/" + file
		shown, failed := os.ReadFile(path)
		if failed == nil && !slices.Contains(strings.Fields(string(shown)), files[file]) {
			failed = os.WriteFile(path, []byte(files[file]), 0)
			if live := v.entry.Bridge != nil || file == "bonding/primary"; !live && l.Attrs().Flags&net.FlagUp != 0 {
				o.log.Warn(fmt.Sprintf("%s of %s was changed by another program; it is set again", file, v.name))
			}
		}
		if v.entry.Bridge != nil && files[file] == "0" && errors.Is(failed, fs.ErrNotExist) {
			continue // this kernel can't, and needn't
		}
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("set an option of %s: %w", v.name, failed))
		}
	}
	return err
}
