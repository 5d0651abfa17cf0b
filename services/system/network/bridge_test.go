package network

import (
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel's events about a bridge's port have no kind. So a pod's veth
// looked like a network card, and got a DHCP client. And when it left the
// bridge, that looked like the removal of the link.
func TestBridgePortIsNotALinkOfItsOwn(t *testing.T) {
	t.Parallel()
	o := &owner{Daemon: &Daemon{o: Options{physical: physicalEthernet}}, links: map[string]netlink.Link{}}
	o.plans = []config.Link{{Name: "eth0"}}
	attrs := netlink.LinkAttrs{Name: "veth1", Index: 7, EncapType: "ether"}

	as := func(family uint8, event uint16, l netlink.Link) netlink.LinkUpdate {
		u := netlink.LinkUpdate{Link: l}
		u.Family, u.Header.Type = family, event
		return u
	}
	veth := &netlink.Veth{LinkAttrs: attrs}
	if o.note(as(unix.AF_UNSPEC, unix.RTM_NEWLINK, veth)) {
		t.Error("a pod's veth is managed")
	}
	for _, event := range []uint16{unix.RTM_NEWLINK, unix.RTM_DELLINK} {
		if o.note(as(unix.AF_BRIDGE, event, &netlink.Device{LinkAttrs: attrs})) {
			t.Errorf("event %d of a bridge's port matters", event)
		}
	}
	if got := o.links["veth1"]; got != veth {
		t.Errorf("the link is known as %v", got)
	}
}
