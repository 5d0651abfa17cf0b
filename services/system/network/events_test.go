package network

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
)

// event is a message of the kernel about a link.
func event(kind uint16, family int, l netlink.Link) syscall.NetlinkMessage {
	a := l.Attrs()
	head := nl.NewIfInfomsg(family)
	head.Type, head.Index, head.Flags = unix.ARPHRD_ETHER, int32(a.Index), a.RawFlags
	data := append(slices.Clone(head.Serialize()), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(a.Name)).Serialize()...)
	data = append(data, nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(a.MTU))).Serialize()...)
	if info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil); family == unix.AF_UNSPEC && l.Type() != "device" {
		info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(l.Type()))
		data = append(data, info.Serialize()...)
	}
	return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data}
}

// matters is whether networkd does something at a message.
func (o *owner) matters(m syscall.NetlinkMessage) bool {
	take := o.parse(m)
	return take != nil && take()
}

// The kernel's events about a bridge's port have no kind. So a pod's veth
// looked like a network card, and got a DHCP client. And when it left the
// bridge, that looked like the removal of the link.
func TestBridgePortIsNotALinkOfItsOwn(t *testing.T) {
	t.Parallel()
	o := &owner{Daemon: New(Options{})}
	o.plans = []config.Link{{Name: "eth0"}}
	attrs := netlink.LinkAttrs{Name: "veth1", Index: 7}
	for _, kind := range []uint16{unix.RTM_NEWLINK, unix.RTM_DELLINK} {
		if o.matters(event(kind, unix.AF_UNSPEC, &netlink.Veth{LinkAttrs: attrs})) {
			t.Errorf("event %d of a pod's veth matters", kind)
		}
		if o.matters(event(kind, unix.AF_BRIDGE, &netlink.Device{LinkAttrs: attrs})) {
			t.Errorf("event %d of a bridge's port matters", kind)
		}
	}
}

// An event of a card matters if it shows something new, and each of its end.
func TestEventsOfACard(t *testing.T) {
	t.Parallel()
	card := func(name string, mtu int, flags uint32) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name, Index: 2, MTU: mtu, RawFlags: flags}}
	}
	o := &owner{Daemon: New(Options{})}
	if !o.matters(event(unix.RTM_NEWLINK, unix.AF_UNSPEC, card("eth0", 1500, 0))) {
		t.Error("a new card doesn't matter")
	}
	o.links = map[string]netlink.Link{"eth0": card("eth0", 1500, 0)}
	for l, want := range map[netlink.Link]bool{
		card("eth0", 1500, 0):               false,
		card("eth0", 1400, 0):               true,
		card("eth1", 1500, 0):               true,
		card("eth0", 1500, unix.IFF_MASTER): false,
	} {
		if got := o.matters(event(unix.RTM_NEWLINK, unix.AF_UNSPEC, l)); got != want {
			t.Errorf("%+v matters: %t", l.Attrs(), got)
		}
	}
	if !o.matters(event(unix.RTM_DELLINK, unix.AF_UNSPEC, card("eth0", 1500, 0))) {
		t.Error("the end of a card doesn't matter")
	}
}

// What has happened to a link is seen by the next list: that it was down, is back, or is gone.
func TestLook(t *testing.T) {
	t.Parallel()
	var here []netlink.Link
	var failed error
	log := &syncBuffer{}
	o := &owner{
		Daemon: New(Options{physical: func(netlink.Link) bool { return true }, list: func() ([]netlink.Link, error) { return here, failed }}),
		log:    slog.New(slog.NewTextHandler(log, nil)),
	}
	is := func(flags net.Flags, raw uint32) {
		here = []netlink.Link{&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "card0", Index: 2, Flags: flags, RawFlags: raw}}}
	}
	look := func() {
		t.Helper()
		if err := o.look(false); err != nil {
			t.Fatal(err)
		}
	}
	own := address{2, prefix("10.0.0.2/24")}
	asks := &client{kick: make(chan struct{}, 1)}
	o.clients = map[leaseKey]*client{{"card0", "DHCP"}: asks}
	is(net.FlagUp, unix.IFF_LOWER_UP)
	look()
	o.known[own], o.of(2).flags, o.made["card0"] = true, managedFlag, virtual{}
	is(net.FlagUp, 0)
	look()
	if !o.known[own] || len(asks.kick) > 0 {
		t.Error("without a carrier, its address is dropped, or its client asks")
	}
	is(net.FlagUp, unix.IFF_LOWER_UP)
	if look(); len(asks.kick) == 0 {
		t.Error("the client doesn't ask when the carrier is back")
	}
	is(0, 0)
	if look(); o.known[own] {
		t.Error("its address is missed although the link was down")
	}
	failed = errors.New("interrupted")
	if err := o.look(false); err == nil || o.links["card0"] == nil {
		t.Errorf("a list that fails removes links (%v)", err)
	}
	here, failed = nil, nil
	look()
	if _, known := o.known[own]; known || len(o.links)+len(o.memory) > 0 {
		t.Errorf("known of a link that is gone: %v %v %v", o.known, o.links, o.memory)
	}
	if !strings.Contains(log.String(), "card0 was removed by another program") {
		t.Errorf("the log says %s", log)
	}
}

// The subscription ends with its context.
func TestListeningEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	o := &owner{heard: make(chan func() bool)}
	if err := o.listen(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	o.lookups.Wait()
}
