// Package netcheck finds out how far a node gets to a host, and at which layer it
// ends:
//
//	DNS (for a name) ─▶ route ─▶ link ─▶ address ─▶ neighbour ─▶ TCP ─▶ TLS
//
// The kernel says which link, source and gateway a packet to the host takes. The node
// asks the gateway, or a host of the same network, by ARP or ND. Without a port, it ends
// there.
package netcheck

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/system/neighbor"
)

const (
	stepTime   = 5 * time.Second // of one step, and of the answer of one name server
	askEvery   = time.Second     // how often a neighbour is asked
	maxServers = 8               // that are asked for a name
)

// Check is one check of a way.
type Check struct {
	Host    string // a name or an address
	Port    uint16 // 0: none
	Servers []netip.Addr
	Trusted *x509.CertPool
	// Tell gets each step, also the last one with its error.
	Tell func(*apiv1.NetworkStep) error

	addr  netip.Addr
	route netlink.Route
	link  netlink.Link
}

// Run returns an error of Tell only.
func (c *Check) Run(ctx context.Context) error {
	steps := []struct {
		layer string
		most  time.Duration
		do    func(context.Context) (string, error)
	}{
		{"DNS", maxServers * stepTime, c.resolve}, {"route", stepTime, c.findRoute}, {"link", stepTime, c.checkLink}, {"address", stepTime, c.checkAddress},
		{"neighbour", stepTime, c.checkNeighbor}, {"TCP", stepTime, c.connect}, {"TLS", stepTime, c.handshake},
	}
	if c.Port == 0 {
		steps = steps[:5]
	}
	if a, err := netip.ParseAddr(c.Host); err == nil {
		c.addr, steps = a, steps[1:]
	}
	for _, s := range steps {
		once, cancel := context.WithTimeout(ctx, s.most)
		began := time.Now()
		result, err := s.do(once)
		cancel()
		step := &apiv1.NetworkStep{Layer: s.layer, Result: result, Took: durationpb.New(time.Since(began))}
		if err != nil {
			step.Error = err.Error()
		}
		if told := c.Tell(step); told != nil || err != nil {
			return told
		}
	}
	return nil
}

// resolve asks each server, and goes on with the first address.
func (c *Check) resolve(ctx context.Context) (string, error) {
	var told []string
	for _, server := range c.Servers[:min(len(c.Servers), maxServers)] {
		r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, netip.AddrPortFrom(server, 53).String())
		}}
		once, cancel := context.WithTimeout(ctx, stepTime)
		found, err := r.LookupNetIP(once, "ip", strings.TrimSuffix(c.Host, ".")+".") // without search domains
		cancel()
		if err != nil {
			told = append(told, fmt.Sprintf("%s: %v", server, err))
			continue
		}
		if told = append(told, fmt.Sprintf("%s says %v", server, found)); !c.addr.IsValid() {
			c.addr = found[0].Unmap()
		}
	}
	if !c.addr.IsValid() {
		return strings.Join(told, "; "), fmt.Errorf("no name server has an address for %s", c.Host)
	}
	return strings.Join(told, "; "), nil
}

func (c *Check) findRoute(context.Context) (string, error) {
	routes, err := netlink.RouteGet(c.addr.AsSlice())
	if err != nil || len(routes) == 0 {
		return "", errors.Join(fmt.Errorf("the node has no route to %s", c.addr), err)
	}
	c.route = routes[0]
	if c.link, err = netlink.LinkByIndex(c.route.LinkIndex); err != nil {
		return "", err
	}
	text := fmt.Sprintf("%s by %s", c.addr, c.link.Attrs().Name)
	if c.route.Gw != nil {
		text += " via " + c.route.Gw.String()
	}
	return text + " from " + c.route.Src.String(), nil
}

func (c *Check) checkLink(context.Context) (string, error) {
	a := c.link.Attrs()
	switch {
	case a.Flags&net.FlagUp == 0:
		return "", fmt.Errorf("%s is down", a.Name)
	case a.RawFlags&unix.IFF_LOWER_UP == 0:
		return "", fmt.Errorf("%s has no carrier: its cable, or what is at the other end", a.Name)
	}
	return fmt.Sprintf("%s is up, MTU %d", a.Name, a.MTU), nil
}

// checkAddress looks whether the source of the packets can be used.
func (c *Check) checkAddress(context.Context) (string, error) {
	own, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	i := slices.IndexFunc(own, func(a netlink.Addr) bool { return a.IP.Equal(c.route.Src) })
	switch {
	case err != nil && !errors.Is(err, netlink.ErrDumpInterrupted):
		return "", err
	case i < 0:
		return "", fmt.Errorf("no link has %s, from which the packets are sent", c.route.Src)
	case own[i].Flags&(unix.IFA_F_DADFAILED|unix.IFA_F_TENTATIVE) != 0:
		return "", fmt.Errorf("%s can't be used: another host of the network has it, or the node still asks for one (gbctl get addresses)", own[i].IPNet)
	}
	return own[i].IPNet.String(), nil
}

// checkNeighbor asks for the gateway, or for the host itself.
func (c *Check) checkNeighbor(ctx context.Context) (string, error) {
	next := c.addr
	if gateway, ok := netip.AddrFromSlice(c.route.Gw); ok {
		next = gateway.Unmap()
	}
	if !neighbor.On(c.link) {
		return fmt.Sprintf("%s needs none", c.link.Attrs().Name), nil
	}
	heard := make(chan net.HardwareAddr, 1)
	wire, err := neighbor.Open(c.link, next, slog.Default(), func(o neighbor.Observed) {
		if o.What == neighbor.Reply && len(heard) == 0 {
			heard <- o.MAC
		}
	})
	if err != nil {
		return "", err
	}
	defer wire.Close()
	for {
		if err := wire.Send(neighbor.ProbeFrame(wire.MAC, nil, next)); err != nil {
			return "", fmt.Errorf("ask for %s: %w", next, err)
		}
		select {
		case mac := <-heard:
			return fmt.Sprintf("%s is %s", next, mac), nil
		case <-time.After(askEvery):
		case <-ctx.Done():
			return "", fmt.Errorf("%s doesn't answer by %s: it is off, in another network, or another VLAN", next, map[bool]string{true: "ARP", false: "ND"}[next.Is4()])
		}
	}
}

func (c *Check) connect(ctx context.Context) (string, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(c.addr, c.Port).String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return "connected from " + conn.LocalAddr().String(), nil
}

// handshake tells of the certificate also if it isn't trusted.
func (c *Check) handshake(ctx context.Context) (string, error) {
	d := tls.Dialer{Config: &tls.Config{ServerName: c.Host, RootCAs: c.Trusted}}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(c.addr, c.Port).String())
	var other tls.RecordHeaderError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.As(err, &other):
		return fmt.Sprintf("port %d has no TLS", c.Port), nil
	case errors.As(err, &untrusted):
		return told(untrusted.UnverifiedCertificates[0]), fmt.Errorf("the node doesn't trust it: %w", untrusted.Err)
	case err != nil:
		return "", err
	}
	defer conn.Close()
	state := conn.(*tls.Conn).ConnectionState()
	return tls.VersionName(state.Version) + "; " + told(state.PeerCertificates[0]) + "; trusted", nil
}

func told(c *x509.Certificate) string {
	return fmt.Sprintf("certificate of %s by %s until %s", c.Subject, c.Issuer, c.NotAfter.UTC().Format(time.RFC3339))
}
