package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
)

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

// advertised are the name servers (netip.Addr) and search domains (string) that the routers of one link have advertised, and until when.
type advertised map[any]time.Time

// notice is a message of the kernel about a router advertisement, or that something of ours was taken away.
type notice struct {
	index   int
	flags   *uint32      // nil: the message isn't about them
	options []ndp.Option // name servers and search domains
	route   bool         // one of a router has changed
	taken   bool         // a route or rule of ours is gone
}

// receive lets the kernel take router advertisements on the link, or not. A link that was up
// before asks for one; for others the kernel does so.
func (o *owner) receive(l netlink.Link, p config.Link) error {
	name, value := l.Attrs().Name, "0"
	if name == "lo" || o.o.receive == nil {
		return nil
	}
	if o.acceptsRA(p) {
		value = "2" // also while the node forwards packets (ip-sysctl)
	}
	changed, err := o.o.receive(name, value)
	if changed && value == "2" && l.Attrs().Flags&net.FlagUp != 0 {
		_ = solicit(name) // without an answer, their next one comes by itself
	}
	return err
}

func (o *owner) acceptsRA(p config.Link) bool {
	return p.Name != "lo" && o.members[p.Name] == "" && (p.AcceptRA == nil || *p.AcceptRA)
}

// acceptRA sets the kernel parameter, and reports whether it was another.
func acceptRA(link, value string) (changed bool, err error) {
	changed, err = setting("/proc/sys/net/ipv6/conf/"+link+"/accept_ra", value)
	if errors.Is(err, fs.ErrNotExist) { // without IPv6
		return false, nil
	}
	return changed, err
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
func solicit(link string) error {
	ifi, err := net.InterfaceByName(link)
	if err != nil {
		return err
	}
	c, _, err := ndp.Listen(ifi, ndp.LinkLocal)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.WriteTo(&ndp.RouterSolicitation{}, nil, netip.IPv6LinkLocalAllRouters())
}

// advertisements sends notices until ctx ends, and the flags of all links at first. The channel
// is closed when messages were lost.
func advertisements(ctx context.Context, log *slog.Logger) (<-chan notice, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_ND_USEROPT, unix.RTNLGRP_IPV6_IFINFO,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("subscribe to router advertisements: %w", err)
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfInfomsg(unix.AF_INET6))
	if err := s.Send(request); err != nil {
		s.Close()
		return nil, fmt.Errorf("ask for the flags of router advertisements: %w", err)
	}
	context.AfterFunc(ctx, s.Close)
	out := make(chan notice)
	go func() {
		defer close(out)
		defer s.Close()
		for {
			messages, from, err := s.Receive()
			if err != nil {
				return
			}
			for _, m := range messages {
				n, ok := parseNotice(log, m.Header.Type, m.Data)
				if from.Pid != nl.PidKernel || !ok {
					continue
				}
				select {
				case out <- n:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return out, nil
}

// parseNotice reads a message of the kernel; the options in it come from another host.
func parseNotice(log *slog.Logger, kind uint16, data []byte) (n notice, ok bool) {
	err := dag.Guard(log, func() error {
		switch {
		case kind == unix.RTM_NEWLINK && len(data) >= unix.SizeofIfInfomsg && data[0] == unix.AF_INET6:
			n.index = int(binary.NativeEndian.Uint32(data[4:]))
			if v := valueOf(valueOf(data[unix.SizeofIfInfomsg:], unix.IFLA_PROTINFO), inet6Flags); len(v) == 4 {
				n.flags, ok = new(binary.NativeEndian.Uint32(v)&(managedFlag|otherFlag)), true
			}
		case (kind == unix.RTM_NEWROUTE || kind == unix.RTM_DELROUTE) && len(data) >= unix.SizeofRtMsg:
			protocol := nl.DeserializeRtMsg(data).Protocol
			n.taken, n.route = kind == unix.RTM_DELROUTE && protocol == ours, protocol == unix.RTPROT_RA
		case kind == unix.RTM_DELRULE && len(data) >= unix.SizeofRtMsg: // its head is as long
			n.taken = slices.Equal(valueOf(data[unix.SizeofRtMsg:], nl.FRA_PROTOCOL), []byte{ours})
		case kind == unix.RTM_NEWNDUSEROPT && len(data) > userOptHead && data[0] == unix.AF_INET6:
			n.index = int(binary.NativeEndian.Uint32(data[4:]))
			size := int(binary.NativeEndian.Uint16(data[2:]))
			if len(data) < userOptHead+size {
				return nil
			}
			// The library parses whole advertisements only.
			head := make([]byte, userOptHead)
			head[0] = routerAdvertisement
			m, err := ndp.ParseMessage(append(head, data[userOptHead:userOptHead+size]...))
			if ra, is := m.(*ndp.RouterAdvertisement); err == nil && is {
				n.options, ok = ra.Options, true
			}
		}
		return nil
	})
	return n, (ok || n.taken || n.route) && err == nil
}

// valueOf is the value of an attribute, nil without one.
func valueOf(attributes []byte, kind uint16) []byte {
	all, _ := nl.ParseRouteAttr(attributes)
	for _, a := range all {
		if a.Attr.Type&^unix.NLA_F_NESTED == kind {
			return a.Value
		}
	}
	return nil
}

// advertise takes a notice over, and reports whether it changes anything.
func (o *owner) advertise(n notice, now time.Time) (changed bool) {
	if n.flags != nil {
		changed = o.flags[n.index] != *n.flags
		o.flags[n.index] = *n.flags
	}
	a := o.advertised[n.index]
	if a == nil {
		a = advertised{}
		o.advertised[n.index] = a
	}
	keep := func(value any, lifetime time.Duration) {
		_, had := a[value]
		if delete(a, value); lifetime > 0 && len(a) < maxAdvertised {
			a[value] = now.Add(lifetime)
		}
		_, has := a[value]
		changed = changed || had != has
	}
	for _, option := range n.options {
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
	maps.DeleteFunc(a, func(_ any, until time.Time) bool { return !now.Before(until) })
	if len(a) == 0 {
		return nil
	}
	l := &lease{source: "RA", server: "routers", link: link, expireAt: slices.MaxFunc(slices.Collect(maps.Values(a)), time.Time.Compare)}
	for _, value := range slices.SortedFunc(maps.Keys(a), func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) {
		switch v := value.(type) {
		case netip.Addr:
			l.resolvers = append(l.resolvers, l.servers("name server", []net.IP{v.AsSlice()})...)
		case string:
			l.setSearch([]string{v})
		}
	}
	return l
}
