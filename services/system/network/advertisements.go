package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/ndp"
	attribute "github.com/mdlayher/netlink"
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

// advertised is what the routers of one link have advertised besides addresses and routes.
type advertised struct {
	servers map[netip.Addr]time.Time // until when
	search  map[string]time.Time
}

// notice is a message of the kernel about a router advertisement.
type notice struct {
	index   int
	flags   *uint32      // nil: the message isn't about them
	options []ndp.Option // name servers and search domains
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
		o.solicit(name)
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

// solicit asks the routers of a link for an advertisement. Without an answer, their next one comes by itself.
func (o *owner) solicit(link string) {
	err := func() error {
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
	}()
	if err != nil {
		o.log.Debug(fmt.Sprintf("no router solicitation on %s: %v", link, err))
	}
}

// advertisements sends notices until ctx ends, and the flags of all links at first. The channel
// is closed when messages were lost.
func advertisements(ctx context.Context, log *slog.Logger) (<-chan notice, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_ND_USEROPT, unix.RTNLGRP_IPV6_IFINFO)
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
			n, ok = parseFlags(data)
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
	return n, ok && err == nil
}

func parseFlags(data []byte) (n notice, ok bool) {
	n.index = int(binary.NativeEndian.Uint32(data[4:]))
	attributes, err := attribute.NewAttributeDecoder(data[unix.SizeofIfInfomsg:])
	if err != nil {
		return n, false
	}
	for attributes.Next() {
		if attributes.Type() != unix.IFLA_PROTINFO {
			continue
		}
		attributes.Nested(func(inner *attribute.AttributeDecoder) error {
			for inner.Next() {
				if inner.Type() == inet6Flags {
					n.flags = new(inner.Uint32() & (managedFlag | otherFlag))
				}
			}
			return nil
		})
	}
	return n, attributes.Err() == nil && n.flags != nil
}

// advertise takes a notice over, and reports whether it changes anything.
func (o *owner) advertise(n notice, now time.Time) (changed bool) {
	if n.flags != nil {
		changed = o.flags[n.index] != *n.flags
		o.flags[n.index] = *n.flags
		return changed
	}
	a := o.advertised[n.index]
	if a == nil {
		a = &advertised{map[netip.Addr]time.Time{}, map[string]time.Time{}}
		o.advertised[n.index] = a
	}
	for _, option := range n.options {
		switch option := option.(type) {
		case *ndp.RecursiveDNSServer:
			for _, s := range option.Servers {
				changed = keepUntil(a.servers, s, now, option.Lifetime) || changed
			}
		case *ndp.DNSSearchList:
			for _, d := range option.DomainNames {
				if d = cleanDomain(d); d != "" {
					changed = keepUntil(a.search, d, now, option.Lifetime) || changed
				}
			}
		}
	}
	return changed
}

// maxAdvertised limits what other hosts can make the node remember for a link.
const maxAdvertised = 16

func keepUntil[K comparable](m map[K]time.Time, key K, now time.Time, lifetime time.Duration) (changed bool) {
	_, had := m[key]
	if lifetime <= 0 {
		delete(m, key)
		return had
	}
	if had || len(m) < maxAdvertised {
		m[key] = now.Add(lifetime)
	}
	return !had
}

// lasting are the keys that last, in a stable order; the others are forgotten.
func lasting[K comparable](m map[K]time.Time, now time.Time, compare func(a, b K) int) (out []K) {
	for key, until := range m {
		if now.Before(until) {
			out = append(out, key)
		} else {
			delete(m, key)
		}
	}
	slices.SortFunc(out, compare)
	return out
}
