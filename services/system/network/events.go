package network

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// maxAtOnce is how many changes by others are taken over at once after a calm tick; more, with each tick.
	maxAtOnce = 8
	// failedFor is how long an address of an advertisement, which another host had, is a problem: until routers have
	// advertised again (RFC 4861 §6.2.1).
	failedFor = 30 * time.Minute
)

// listen receives what the kernel reports until ctx ends, and the flags of all links at first. It is a wake-up: what is
// there now is listed by reconcile. Only what no list has is taken from the messages themselves.
func (o *owner) listen(ctx context.Context) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
		unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV6_IFINFO, unix.RTNLGRP_ND_USEROPT)
	if err != nil {
		return fmt.Errorf("subscribe to the kernel's events: %w", err)
	}
	flags := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	flags.AddData(nl.NewIfInfomsg(unix.AF_INET6))
	if err := s.Send(flags); err != nil {
		s.Close()
		return fmt.Errorf("ask for the flags of router advertisements: %w", err)
	}
	context.AfterFunc(ctx, s.Close)
	o.lookups.Go(func() {
		for ctx.Err() == nil {
			messages, from, err := s.Receive()
			if err != nil && ctx.Err() == nil { // the kernel's buffer overflowed: some are lost
				_ = s.Send(flags)
				o.tell(ctx, func() bool { return true })
				sleep.For(ctx, retryEvery)
			}
			for _, m := range messages {
				var take func() bool
				err := dag.Guard(o.log, func() error { take = o.parse(m); return nil })
				if err == nil && take != nil && from.Pid == nl.PidKernel {
					o.tell(ctx, take)
				}
			}
		}
	})
	return nil
}

// tell lets the owner's goroutine take something over; take reports whether that changes what is wanted, or there.
func (o *owner) tell(ctx context.Context, take func() bool) {
	select {
	case o.heard <- take:
	case <-ctx.Done():
	}
}

// parse reads a message of the kernel; the options in one come from another host. The result takes the message over,
// and reports whether there is something to do; nil: there is nothing.
func (o *owner) parse(m syscall.NetlinkMessage) func() bool {
	switch kind, data := m.Header.Type, m.Data; kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return o.parseLink(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		attributes := data[unix.SizeofIfAddrmsg:]
		// IPv4 has the other end's address in the second
		local, ip := valueOf(attributes, unix.IFA_LOCAL), valueOf(attributes, unix.IFA_ADDRESS)
		own := address{int(binary.NativeEndian.Uint32(data[4:])), netip.PrefixFrom(addrOf(either(local == nil, ip, local)), int(data[1]))}
		flags := binary.NativeEndian.Uint32(valueOf(attributes, unix.IFA_FLAGS))
		return func() bool { return o.noteAddress(own, flags, kind == unix.RTM_NEWADDR) }
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if by := nl.DeserializeRtMsg(data).Protocol; by == unix.RTPROT_RA || by == ours && kind == unix.RTM_DELROUTE {
			return o.afford
		}
	case unix.RTM_DELRULE:
		return o.afford
	case unix.RTM_NEWNDUSEROPT:
		if options := parseOptions(data); options != nil {
			index := int(binary.NativeEndian.Uint32(data[4:]))
			return func() bool { return o.advertise(index, options, time.Now()) && o.afford() }
		}
	}
	return nil
}

// parseLink leaves out bridges' events of their ports: these don't have the link's kind, so that a pod's veth would
// look like a network card, and "deleted" only means removed from the bridge.
func (o *owner) parseLink(m syscall.NetlinkMessage) func() bool {
	switch header := unix.NlMsghdr(m.Header); m.Data[0] {
	case unix.AF_UNSPEC:
		if l, err := netlink.LinkDeserialize(&header, m.Data); err == nil {
			return func() bool { return o.concerns(l, header.Type == unix.RTM_DELLINK) }
		}
	case unix.AF_INET6:
		index, v := int(binary.NativeEndian.Uint32(m.Data[4:])), valueOf(valueOf(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_PROTINFO), inet6Flags)
		if len(v) == 4 {
			flags := binary.NativeEndian.Uint32(v) & (managedFlag | otherFlag)
			return func() bool {
				before := o.of(index).flags
				o.of(index).flags = flags
				return before != flags && o.afford()
			}
		}
	}
	return nil
}

// valueOf is the value of an attribute, nil without one.
func valueOf(attributes []byte, kind uint16) []byte {
	all, _ := nl.ParseRouteAttrAsMap(attributes)
	return all[kind].Value
}

// afford reports whether what others have changed is taken over at once; else it is with the next tick. So neither a
// router nor another program makes networkd work all the time.
func (o *owner) afford() bool {
	if o.spent++; o.spent <= maxAtOnce {
		return true
	}
	o.due = time.Now()
	return false
}

// noteAddress reports whether an event of an address may matter: one is gone, or duplicate address detection has ended.
// The kernel itself removes one of a router advertisement that another host has.
func (o *owner) noteAddress(a address, flags uint32, there bool) bool {
	name := o.linkName(a.index)
	l, now, key := o.links[name], time.Now(), leaseKey{name, a.prefix.String()}
	if l == nil || there && a.prefix.Addr().Is4() {
		return false
	}
	_, managed := o.plan(l)
	switch {
	case there && flags&(unix.IFA_F_DADFAILED|unix.IFA_F_TENTATIVE) == 0:
		delete(o.declined, key)
	case flags&(unix.IFA_F_DADFAILED|unix.IFA_F_PERMANENT) == unix.IFA_F_DADFAILED && managed && len(o.declined) < maxAdvertised:
		maps.DeleteFunc(o.declined, func(_ leaseKey, d declined) bool { return now.After(d.until) })
		o.declined[key] = declined{until: now.Add(failedFor), problem: a.on(name) + ": " + errTaken.Error()}
	}
	return managed && o.afford()
}

// concerns reports whether an event shows a change of a link that networkd configures: pods' links come and go all the
// time.
func (o *owner) concerns(l netlink.Link, gone bool) bool {
	old := o.links[o.linkName(l.Attrs().Index)]
	_, managed := o.plan(l)
	if old != nil && !managed {
		_, managed = o.plan(old) // it may have been renamed
	}
	return managed && (gone || old == nil || seen(old) != seen(l) || o.plugged(l))
}

// seen is what networkd uses of a link's state. A new member of a bond is up before it is a member, and a link that was
// removed from the configuration meanwhile can leave only then.
func seen(l netlink.Link) any {
	a := l.Attrs()
	return [...]any{a.Name, a.Flags, carrier(l), a.MasterIndex, a.MTU, a.HardwareAddr.String(), fmt.Sprint(a.AltNames)}
}

// plugged reports whether a link has got a carrier again. That a cable was unplugged for a short time may be visible
// only by the kernel's count.
func (o *owner) plugged(l netlink.Link) bool {
	return carrier(l) && o.of(l.Attrs().Index).ups != ups(l)
}

func ups(l netlink.Link) string {
	count, _ := os.ReadFile("/sys/class/net/" + l.Attrs().Name + "/carrier_up_count")
	return string(count)
}

func carrier(l netlink.Link) bool { return l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 }

// look lists the links, and notes what has happened to them since the last time. byUs says that networkd has removed
// one.
func (o *owner) look(byUs bool) error {
	all, err := o.o.list()
	if err != nil {
		return err
	}
	here := map[int]bool{}
	o.links = map[string]netlink.Link{}
	for _, l := range all {
		a := l.Attrs()
		m := o.of(a.Index)
		old := m.link
		o.links[a.Name], here[a.Index], m.link, m.name = l, true, l, a.Name
		if _, managed := o.plan(l); !managed {
			continue
		}
		back := o.plugged(l)
		if back {
			m.ups = ups(l)
		}
		if old != nil && (old.Attrs().Flags^a.Flags)&net.FlagUp != 0 {
			o.dropped(a.Index, false)
		}
		for key, c := range o.clients {
			if key.link == a.Name && (back || old != nil && carrier(l) && !carrier(old)) {
				sleep.Wake(c.kick)
			}
		}
	}
	for index, m := range o.memory {
		if here[index] {
			continue
		}
		if _, made := o.made[m.name]; made && !byUs {
			o.log.Warn(m.name + " was removed by another program, or with the link that it was on; it is made again")
		}
		o.dropped(index, true)
		delete(o.memory, index)
	}
	return nil
}

// The kernel takes addresses and routes of router advertisements (RFC 4861, 4862) by itself, on
// the links where networkd lets it. Of name servers and search domains (RFC 8106) it only
// reports the options, and of DHCPv6 the flags.
const (
	managedFlag         = 0x40 // IF_RA_MANAGED: addresses come by DHCPv6 (linux/if_link.h, net/if_inet6.h)
	otherFlag           = 0x80 // IF_RA_OTHERCONF: what else a node needs does
	userOptHead         = 16   // size of struct nduseroptmsg (linux/rtnetlink.h)
	inet6Flags          = 1    // IFLA_INET6_FLAGS
	routerAdvertisement = 134  // type of ICMPv6 (RFC 4861 §4.2)
)

// advertised are the name servers (netip.Addr) and search domains (string) that the routers of one link have
// advertised.
type advertised map[any]heard

// heard is until when something is advertised, and its place in the list of its router.
type heard struct {
	until time.Time
	place int
}

// receive lets the kernel take router advertisements on the link, or not. A link that was up
// before asks for one; for others the kernel does so. metric is that of the default routes.
func (o *owner) receive(l netlink.Link, p config.Link, metric int) error {
	// 2: also while the node forwards packets (ip-sysctl)
	name, value := l.Attrs().Name, either(o.acceptsRA(p), "2", "0")
	if name == "lo" {
		return nil
	}
	const settings = "/proc/sys/net/ipv6/conf/"
	_, err := setting(settings+name+"/ra_defrtr_metric", strconv.Itoa(metric))
	changed, refused := setting(settings+name+"/accept_ra", value)
	err = cmp.Or(refused, err)
	if changed && value == "2" && l.Attrs().Flags&net.FlagUp != 0 {
		_ = solicit(l) // without an answer, their next one comes by itself
	} else if changed && value == "0" {
		err = errors.Join(err, o.forget(l.Attrs().Index))
	}
	if errors.Is(err, fs.ErrNotExist) { // without IPv6
		return nil
	}
	return err
}

// forget removes what the kernel has of router advertisements on a link.
func (o *owner) forget(index int) (err error) {
	for _, w := range o.state.advertised {
		if r, is := w.object.(route); is && r.index == index {
			k := r.kernel()
			k.Protocol = unix.RTPROT_UNSPEC
			err = errors.Join(err, netlink.RouteDel(k))
		} else if w.link() == index {
			err = errors.Join(err, w.change(false))
		}
	}
	return err
}

func (o *owner) acceptsRA(p config.Link) bool {
	return p.Name != "lo" && o.members[p.Name] == "" && p.AcceptRA != config.AdvertisementsOff
}

// setting writes a file of the kernel that has another value, and reports whether it had.
func setting(file, value string) (changed bool, err error) {
	old, err := os.ReadFile(file)
	if err != nil || strings.TrimSpace(string(old)) == value {
		return false, err
	}
	err = os.WriteFile(file, []byte(value), 0)
	return err == nil, err
}

// solicit asks the routers of a link for an advertisement.
func solicit(l netlink.Link) error {
	c, _, err := ndp.Listen(&net.Interface{Index: l.Attrs().Index, Name: l.Attrs().Name}, ndp.LinkLocal)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.WriteTo(&ndp.RouterSolicitation{}, nil, netip.IPv6LinkLocalAllRouters())
}

// parseOptions reads the name servers and search domains in a message of the kernel, which come from another host.
func parseOptions(data []byte) []ndp.Option {
	size := int(binary.NativeEndian.Uint16(data[2:]))
	if data[0] != unix.AF_INET6 || len(data) < userOptHead+size {
		return nil
	}
	head := make([]byte, userOptHead)
	head[0] = routerAdvertisement // the library parses whole advertisements only
	m, err := ndp.ParseMessage(append(head, data[userOptHead:userOptHead+size]...))
	if ra, is := m.(*ndp.RouterAdvertisement); err == nil && is {
		return ra.Options
	}
	return nil
}

// advertise takes options of an advertisement over, and reports whether they change anything.
func (o *owner) advertise(index int, options []ndp.Option, now time.Time) (changed bool) {
	a := o.of(index).advertised
	place := 0
	keep := func(value any, lifetime time.Duration) {
		_, had := a[value]
		if delete(a, value); lifetime > 0 && len(a) < maxAdvertised {
			a[value] = heard{now.Add(lifetime), place}
		}
		place++
		_, has := a[value]
		changed = changed || had != has
	}
	for _, option := range options {
		switch option := option.(type) {
		case *ndp.RecursiveDNSServer:
			for _, s := range option.Servers {
				keep(s, option.Lifetime)
			}
		case *ndp.DNSSearchList:
			for _, d := range option.DomainNames {
				keep(d, option.Lifetime)
			}
		}
	}
	return changed
}

// maxAdvertised limits what other hosts can make the node remember for a link.
const maxAdvertised = 16

// lease is what lasts of it as a lease, in a stable order; nil for nothing.
func (a advertised) lease(link string, now time.Time) *lease {
	maps.DeleteFunc(a, func(_ any, h heard) bool { return !now.Before(h.until) })
	if len(a) == 0 {
		return nil
	}
	l := &lease{LeaseStatus: LeaseStatus{Source: "RA", Server: "routers", Link: link}}
	for _, value := range slices.SortedFunc(maps.Keys(a), func(v, w any) int {
		return cmp.Or(a[v].place-a[w].place, strings.Compare(fmt.Sprint(v), fmt.Sprint(w)))
	}) {
		if until := a[value].until; until.After(l.Expires) {
			l.Expires = until
		}
		switch v := value.(type) {
		case netip.Addr:
			l.Resolvers = append(l.Resolvers, l.servers("name server", []net.IP{v.AsSlice()})...)
		case string:
			l.setSearch([]string{v})
		}
	}
	return l
}
