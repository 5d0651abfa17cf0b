package network

import (
	"errors"
	"fmt"
	"os"

	"github.com/garboard-os/garboard/qemu/network/wire"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Tap makes the cable of a virtual machine: a port of the bridge whose other end QEMU
// inherits. The caller closes cable once QEMU runs. The link ends with QEMU.
func (l *LAN) Tap(n Node) (cable *os.File, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.removeLink(n); err != nil {
		return nil, err
	}
	err = l.thread.Do(func() (err error) { cable, err = wire.OpenTap(linkName("node", n)); return err })
	if err != nil {
		return nil, fmt.Errorf("make the link of %s: %w", n.Name, err)
	}
	if err := l.connect(n); err != nil {
		cable.Close()
		return nil, fmt.Errorf("connect %s: %w", n.Name, err)
	}
	return cable, nil
}

// Veth makes the cable of a container: one end is a port of the bridge, and the container
// takes the other end, peer, into its namespace. The link ends with that namespace, so each
// start makes a new one.
func (l *LAN) Veth(n Node) (peer string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ours := linkName("node", n)
	peer = "to-" + ours
	if err := l.removeLink(n); err != nil {
		return "", err
	}
	veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: peer, PeerHardwareAddr: HardwareAddress(l.config.Cluster, n.Name)}
	veth.Name = ours
	if err := l.links.LinkAdd(veth); err != nil {
		return "", fmt.Errorf("make the link of %s: %w", n.Name, err)
	}
	return peer, l.connect(n)
}

// linkName returns the name of a link: short, and unique in the namespace.
func linkName(what string, n Node) string {
	host := n.Address.AsSlice()
	return fmt.Sprintf("%s%d.%d", what, host[len(host)-2], host[len(host)-1])
}

// removeLink removes a node's port of the bridge, if an earlier run has left one.
func (l *LAN) removeLink(n Node) error {
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

// connect connects a node's cable to the cluster's bridge, through a wire where its
// conditions are bad. It must be called with the mutex held.
func (l *LAN) connect(n Node) error {
	if err := l.removeWire(n); err != nil {
		return err
	}
	to := l.conditions[n.Name]
	if to.fine() {
		return l.plug(linkName("node", n), bridgeName)
	}
	own, near, far := linkName("wire", n), linkName("near", n), linkName("far", n)
	var w *wire.Wire
	err := l.thread.Do(func() (err error) {
		w, err = wire.Open([2]string{near, far}, wire.Conditions{Delay: to.Delay, Jitter: to.Jitter, Loss: to.Loss, Drop: l.drops(to)})
		return err
	})
	if err != nil {
		return err
	}
	l.wires[n.Name] = w
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = own
	if err := l.links.LinkAdd(bridge); err != nil {
		return err
	}
	// Without ARP: otherwise this machine would answer here for its address on the cluster's
	// bridge.
	if err := errors.Join(l.links.LinkSetARPOff(bridge), l.links.LinkSetUp(bridge)); err != nil {
		return err
	}
	return errors.Join(l.plug(linkName("node", n), own), l.plug(near, own), l.plug(far, bridgeName))
}

// removeWire removes the wire of a node, if it has one.
func (l *LAN) removeWire(n Node) error {
	var errs []error
	if w := l.wires[n.Name]; w != nil {
		delete(l.wires, n.Name)
		errs = append(errs, w.Close())
	}
	if bridge, err := l.links.LinkByName(linkName("wire", n)); err == nil {
		errs = append(errs, l.links.LinkDel(bridge))
	}
	return errors.Join(errs...)
}

// plug makes a link a port of a bridge.
func (l *LAN) plug(name, bridge string) error {
	link, err := l.links.LinkByName(name)
	if err != nil {
		return err
	}
	master, err := l.links.LinkByName(bridge)
	if err != nil {
		return err
	}
	return errors.Join(l.links.LinkSetMaster(link, master), l.links.LinkSetUp(link))
}
