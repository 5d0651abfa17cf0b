package network

import (
	"cmp"
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
	"time"

	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
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
	name, value := l.Attrs().Name, "0"
	if name == "lo" {
		return nil
	}
	if o.acceptsRA(p) {
		value = "2" // also while the node forwards packets (ip-sysctl)
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
