package qemu

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

	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/qemu/registry"
	"github.com/garboard-os/garboard/qemu/wire"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const bridgeName = "nodes"

// lan is the network of a cluster: a bridge in a network namespace that only this
// process knows.
//
//	host process ── the thread's namespace: bridge 10.5.0.1/24, registry on :5000,
//	                   │                load balancer on :6443, for machines DHCP
//	                   ├─ veth ── eth0 of a container
//	                   └─ tap ─── eth0 of a machine
//
// There is no way out of it, so no node ever reaches another machine, and two
// clusters may use the same addresses.
type lan struct {
	plan   Plan
	dir    clusterDir
	log    *slog.Logger
	thread *osthread.Thread
	links  *netlink.Handle // into the thread's namespace
	images net.Listener

	mu       sync.Mutex // guards all below
	networks map[string]Network
	wires    map[string]*wire.Wire // of those whose network is bad
}

func newLAN(p Plan, d clusterDir, log *slog.Logger) (_ *lan, err error) {
	thread, err := osthread.NewInNamespace()
	if err != nil {
		return nil, err
	}
	l := &lan{plan: p, dir: d, log: log, thread: thread, networks: map[string]Network{}, wires: map[string]*wire.Wire{}}
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
	if l.images, err = thread.Listen(p.registryAddress().String()); err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	go serve(l.images, registry.New(p.Images), log)
	return l, nil
}

// serve answers HTTP until l is closed.
func serve(l net.Listener, h http.Handler, log *slog.Logger) {
	if err := http.Serve(l, h); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Error("serve", "address", l.Addr(), "error", err)
	}
}

func (l *lan) makeBridge() error {
	lo, err := l.links.LinkByName("lo")
	if err != nil {
		return err
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = bridgeName
	// Of its own: otherwise it changes with the nodes that come and go, and the others
	// lose the load balancer until they have asked for its address again.
	bridge.HardwareAddr = hardwareAddress(l.plan.Name, bridgeName)
	if err := l.links.LinkAdd(bridge); err != nil {
		return err
	}
	address := netip.PrefixFrom(gateway(l.plan.Network), l.plan.Network.Bits())
	if err := l.links.AddrAdd(bridge, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
		return err
	}
	return errors.Join(l.links.LinkSetUp(lo), l.links.LinkSetUp(bridge))
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// hardwareAddress is a node's MAC address: always the same, and locally
// administered (IEEE 802: second bit of the first octet).
func hardwareAddress(cluster, node string) net.HardwareAddr {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%s", cluster, node)
	sum := h.Sum(nil)
	return net.HardwareAddr{0x02, 'g', sum[4], sum[5], sum[6], sum[7]}
}

// dropLink removes a node's end of its cable that a run before may have left.
func (l *lan) dropLink(n Node) error {
	old, err := l.links.LinkByName(linkName("node", n))
	if err != nil {
		return nil // there is none
	}
	// The kernel may be about to remove it with its namespace, whose end takes a while.
	if err := l.links.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove the old link of %s: %w", n.Name, err)
	}
	return nil
}

// Reach connects to a port of a node.
func (l *lan) Reach(ctx context.Context, n Node, port int) (net.Conn, error) {
	return l.thread.Dial(ctx, netip.AddrPortFrom(n.Address, uint16(port)).String())
}

// Listen opens a TCP port to the nodes.
func (l *lan) Listen(address netip.AddrPort) (net.Listener, error) {
	return l.thread.Listen(address.String())
}

// Close removes the network. All nodes have ended.
func (l *lan) Close() error {
	var errs []error
	if l.images != nil {
		errs = append(errs, l.images.Close())
	}
	l.mu.Lock()
	for _, w := range l.wires {
		errs = append(errs, w.Close())
	}
	l.mu.Unlock()
	if l.links != nil {
		l.links.Close()
	}
	return errors.Join(append(errs, l.thread.Close())...)
}
