// Package netboot serves what machines boot over the network, beside the DHCP server that gives them their addresses.
//
//	machine                              existing DHCP server      Server
//	  │ DHCPDISCOVER, vendor class PXEClient or HTTPClient
//	  ├─ broadcast ─────────────────────────────▶│──────────────────▶│ :67
//	  │◀─ DHCPOFFER: address ────────────────────┤                   │
//	  │◀─ DHCPOFFER: boot file, no address ──────────────────────────┤
//	  │  (firmware that asks the boot server again: DHCPREQUEST ────▶│ :4011)
//	  ├─ boot file by TFTP (:69) or HTTP ───────────────────────────▶│
//	  ├─ kernel and system by HTTP, if the boot file is iPXE ───────▶│
//	  └─ its configuration by HTTP ─────────────────────────────────▶│
//
// The protocols are PXE 2.1 with RFC 4578 (proxy DHCP), TFTP (RFC 1350), and HTTP boot of UEFI 2.10, 24.7. Clients that
// don't ask for a boot file get no answer.
package netboot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Options describe a Server.
type Options struct {
	On       Interface
	HTTPPort int
	// Configs are the configurations of machines; nil: they aren't served.
	Configs *Configs
	Out     io.Writer // what machines ask for
}

// Ports of the protocols. Only the one of HTTP can be chosen, because the client gets its URL.
type ports struct{ dhcp, boot, tftp, http int }

const (
	dhcpPort = 67   // RFC 2131
	bootPort = 4011 // PXE 2.1, 2.2.4: for the boot server on a machine that also has a DHCP server
	tftpPort = 69   // RFC 1350
)

// Server answers until Run ends.
type Server struct {
	o        Options
	files    map[string][]byte
	report   *report
	machines machines

	dhcp, boot, tftp net.PacketConn
	http             net.Listener
	transfers        chan struct{} // holds an item for each transfer by TFTP
}

// New opens the ports. Close closes them.
func New(ctx context.Context, o Options) (*Server, error) {
	return open(ctx, o, ports{dhcpPort, bootPort, tftpPort, o.HTTPPort})
}

func open(ctx context.Context, o Options, p ports) (_ *Server, err error) {
	s := &Server{o: o, report: &report{out: o.Out, now: time.Now}, machines: newMachines(), transfers: make(chan struct{}, maxTransfers)}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	// Broadcasts arrive only at sockets without an address.
	onInterface := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bindErr error
		err := c.Control(func(fd uintptr) { bindErr = dhcpv4.BindToInterface(int(fd), o.On.Name) })
		return errors.Join(err, bindErr)
	}}
	if s.dhcp, err = onInterface.ListenPacket(ctx, "udp4", ":"+strconv.Itoa(p.dhcp)); err != nil {
		return nil, explain(err, p.dhcp, "UDP", "proxy DHCP", "a DHCP server, such as dnsmasq or the one of a hypervisor")
	}
	if s.boot, err = onInterface.ListenPacket(ctx, "udp4", ":"+strconv.Itoa(p.boot)); err != nil {
		return nil, explain(err, p.boot, "UDP", "the boot server of PXE", "a PXE server")
	}
	address := func(port int) string { return net.JoinHostPort(o.On.Address.String(), strconv.Itoa(port)) }
	var plain net.ListenConfig
	if s.tftp, err = plain.ListenPacket(ctx, "udp4", address(p.tftp)); err != nil {
		return nil, explain(err, p.tftp, "UDP", "TFTP", "a TFTP server")
	}
	if s.http, err = plain.Listen(ctx, "tcp4", address(p.http)); err != nil {
		return nil, explain(err, p.http, "TCP", "HTTP", "a web server; --http-port chooses another port")
	}
	return s, nil
}

// explain says what to do about a port that can't be opened.
func explain(err error, port int, network, what, other string) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s port %d (%s) is in use by another program of this machine: stop that program ('ss -lnp' lists it; it may be %s), or serve from another machine: %w",
			network, port, what, other, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s port %d (%s) needs root or CAP_NET_BIND_SERVICE: run gbctl with sudo, or once 'setcap cap_net_bind_service=+ep' on the program: %w",
			network, port, what, err)
	}
	return fmt.Errorf("%s port %d (%s): %w", network, port, what, err)
}

// Close closes the ports.
func (s *Server) Close() {
	for _, c := range []io.Closer{s.dhcp, s.boot, s.tftp, s.http} {
		if c != nil {
			c.Close()
		}
	}
}

// url is where a file is.
func (s *Server) url(name string) string { return "http://" + s.http.Addr().String() + "/" + name }

// Run serves files, by name, until ctx ends or a port fails. All transfers have ended when it returns. Nobody else may
// change the files.
func (s *Server) Run(ctx context.Context, files map[string][]byte) error {
	s.files = files
	until, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for _, serve := range []func(context.Context) error{
		func(context.Context) error { return s.serveDHCP(s.dhcp, false) },
		func(context.Context) error { return s.serveDHCP(s.boot, true) },
		s.serveTFTP,
		s.serveHTTP,
	} {
		all.Go(func() { cancel(serve(until)) })
	}
	<-until.Done()
	s.Close()
	all.Wait()
	if ctx.Err() != nil {
		return nil // it was ended
	}
	return context.Cause(until)
}

// An Interface is where machines are.
type Interface struct {
	Name    string
	Address netip.Addr
}

// FindInterface returns the interface with a name or an address. If choice is "", there must be only one that is up and
// isn't a loopback.
func FindInterface(choice string) (Interface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return Interface{}, err
	}
	var found []Interface
	known := ""
	for _, i := range all {
		addresses, err := i.Addrs()
		if err != nil {
			return Interface{}, fmt.Errorf("addresses of %s: %w", i.Name, err)
		}
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 {
			continue
		}
		for _, a := range addresses {
			prefix, err := netip.ParsePrefix(a.String())
			if err != nil || !prefix.Addr().Is4() {
				continue
			}
			known += fmt.Sprintf("\n  %s (%s)", i.Name, prefix.Addr())
			if choice == "" || choice == i.Name || choice == prefix.Addr().String() {
				found = append(found, Interface{i.Name, prefix.Addr()})
			}
		}
	}
	switch {
	case known == "":
		return Interface{}, errors.New("no network interface is up and has an IPv4 address")
	case len(found) == 0:
		return Interface{}, fmt.Errorf("no interface %s is up with an IPv4 address; there are:%s", choice, known)
	case len(found) > 1:
		return Interface{}, fmt.Errorf("choose the interface of the machines, or its address, with --interface:%s", known)
	}
	return found[0], nil
}
