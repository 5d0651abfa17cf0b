// Package network is the network of a cluster's nodes: a bridge, the cables of the nodes,
// DHCP, and the registries that nodes pull images from.
package network

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/network/wire"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	bridgeName   = "nodes"
	registryPort = 5000
	bootPort     = 8080 // of the files for a boot over the network
)

// Config describes a network.
type Config struct {
	Cluster string       // the cluster's name; hardware addresses are made from it
	Prefix  netip.Prefix // the first address is the host process's
	Second  netip.Prefix // likewise, of the other address family; invalid: none
	Nodes   []Node
	Images  []string // OCI layouts of the registry
	Mirrors []Mirror // registries outside of the network that nodes may use
	Host    string   // where this machine is for the host process; "": it runs there
	// Internet gives nodes and pods a way out.
	Internet bool
	Boot     string // directory with the files for a boot over the network (image/media); "": none
}

// Node is a node of the network.
type Node struct {
	Name    string
	Address netip.Addr
}

// LAN is a bridge in a network namespace that only this process uses.
//
//	host process ── the thread's namespace: bridge 10.5.0.1/24, registry on :5000,
//	                   │                load balancer on :6443, for machines DHCP
//	                   ├─ veth ── eth0 of a container
//	                   └─ tap ─── eth0 of a machine
//
// There is no way out of it, unless Config.Internet makes one. So nodes can't connect to other
// machines, and two clusters may use the same addresses.
type LAN struct {
	config   Config
	log      *slog.Logger
	thread   *osthread.Thread
	links    *netlink.Handle // into the thread's namespace
	images   net.Listener
	boot     net.Listener // nil: none
	internet func()       // closes the way out

	mu         sync.Mutex // guards all below
	conditions map[string]Conditions
	wires      map[string]*wire.Wire // of the nodes whose conditions are bad
}

// New makes a network, with the registry of the images.
func New(c Config, log *slog.Logger) (_ *LAN, err error) {
	thread, err := osthread.NewInNamespace()
	if err != nil {
		return nil, err
	}
	l := newLAN(c, log, thread)
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if err := thread.Do(func() (err error) { l.links, err = netlink.NewHandle(); return err }); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if err := l.makeBridge(); err != nil {
		return nil, fmt.Errorf("make the cluster's bridge: %w", err)
	}
	if err := l.serveImages(); err != nil {
		return nil, err
	}
	if c.Internet {
		if err := l.openInternet(); err != nil {
			return nil, fmt.Errorf("way to the internet: %w", err)
		}
	}
	if c.Boot == "" {
		return l, nil
	}
	if l.boot, err = l.Listen(netip.AddrPortFrom(Gateway(c.Prefix), bootPort)); err != nil {
		return nil, fmt.Errorf("files for a boot over the network: %w", err)
	}
	go serve(l.boot, http.FileServer(http.Dir(c.Boot)), log)
	return l, nil
}

// Join is a network that somebody else has made, and in which this process has the first address, with the registry of
// the images.
func Join(c Config, log *slog.Logger) (*LAN, error) {
	l := newLAN(c, log, osthread.New())
	if err := l.serveImages(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func newLAN(c Config, log *slog.Logger, thread *osthread.Thread) *LAN {
	return &LAN{config: c, log: log, thread: thread, conditions: map[string]Conditions{}, wires: map[string]*wire.Wire{}, internet: func() {}}
}

func (l *LAN) serveImages() (err error) {
	if l.images, err = l.Listen(RegistryAddress(l.config.Prefix)); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	go serve(l.images, registry.New(l.config.Images...), l.log)
	return nil
}

// serve answers HTTP until l is closed.
func serve(l net.Listener, h http.Handler, log *slog.Logger) {
	if err := http.Serve(l, h); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Error("serve", "address", l.Addr(), "error", err)
	}
}

func (l *LAN) makeBridge() error {
	lo, err := l.links.LinkByName("lo")
	if err != nil {
		return err
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = bridgeName
	// Without an address of its own, the bridge has that of one of its ports. It would change
	// when nodes start and stop, and the other nodes would lose the load balancer until their
	// next ARP request.
	bridge.HardwareAddr = HardwareAddress(l.config.Cluster, bridgeName)
	if err := l.links.LinkAdd(bridge); err != nil {
		return err
	}
	for _, prefix := range []netip.Prefix{l.config.Prefix, l.config.Second} {
		if !prefix.IsValid() {
			continue
		}
		address := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(Gateway(prefix), prefix.Bits()))}
		if prefix.Addr().Is6() {
			address.Flags = unix.IFA_F_NODAD // usable at once, for the registry
		}
		if err := l.links.AddrAdd(bridge, address); err != nil {
			return err
		}
	}
	return errors.Join(l.links.LinkSetUp(lo), l.links.LinkSetUp(bridge))
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Gateway returns the address of the host process in a network: the first one.
func Gateway(network netip.Prefix) netip.Addr { return network.Masked().Addr().Next() }

// RegistryAddress returns the address of the images' registry in a network.
func RegistryAddress(network netip.Prefix) netip.AddrPort {
	return netip.AddrPortFrom(Gateway(network), registryPort)
}

// HardwareAddress returns a node's MAC address: always the same, and locally administered
// (IEEE 802: second bit of the first octet).
func HardwareAddress(cluster, node string) net.HardwareAddr {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%s", cluster, node)
	sum := h.Sum(nil)
	return net.HardwareAddr{0x02, 'g', sum[4], sum[5], sum[6], sum[7]}
}

// Thread returns the thread in the network's namespace. Nodes are started on it.
func (l *LAN) Thread() *osthread.Thread { return l.thread }

// Dial connects to a TCP port of a node.
func (l *LAN) Dial(ctx context.Context, n Node, port int) (net.Conn, error) {
	return l.thread.Dial(ctx, netip.AddrPortFrom(n.Address, uint16(port)).String())
}

// Listen opens a TCP port to the nodes.
func (l *LAN) Listen(address netip.AddrPort) (net.Listener, error) {
	return l.thread.Listen(address.String())
}

// Close removes the network. All nodes must have ended.
func (l *LAN) Close() error {
	var errs []error
	if l.boot != nil {
		errs = append(errs, l.boot.Close())
	}
	if l.images != nil {
		errs = append(errs, l.images.Close())
	}
	l.mu.Lock()
	for _, w := range l.wires {
		errs = append(errs, w.Close())
	}
	l.mu.Unlock()
	l.internet()
	if l.links != nil {
		l.links.Close()
	}
	return errors.Join(append(errs, l.thread.Close())...)
}
