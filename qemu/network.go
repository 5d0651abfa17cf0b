package qemu

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu/wire"
	"github.com/vishvananda/netlink"
)

// Network is how a node's network is; the zero value is as it should be. It stays so
// when the node starts again, and is mended when the cluster does.
type Network struct {
	// Off cuts the node off from all others and from this machine. It doesn't see that:
	// its cable is in its place.
	Off bool
	// CutFrom are nodes that it neither hears nor reaches.
	CutFrom []string
	// DeafTo are nodes that it reaches, and doesn't hear.
	DeafTo []string
	Delay  time.Duration // in each direction
	Jitter time.Duration // up to so much more
	Loss   float64       // part of the frames that get lost, in each direction, 0 to 1
}

func (n Network) fine() bool {
	return !n.Off && len(n.CutFrom) == 0 && len(n.DeafTo) == 0 && n.Delay == 0 && n.Jitter == 0 && n.Loss == 0
}

func (n Network) String() string {
	var parts []string
	add := func(yes bool, format string, args ...any) {
		if yes {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(n.Off, "cut off")
	add(len(n.CutFrom) > 0, "cut off from %s", strings.Join(n.CutFrom, " "))
	add(len(n.DeafTo) > 0, "deaf to %s", strings.Join(n.DeafTo, " "))
	add(n.Delay > 0, "delay %s", n.Delay)
	add(n.Jitter > 0, "jitter %s", n.Jitter)
	add(n.Loss > 0, "loss %g%%", n.Loss*100)
	if parts == nil {
		return "fine"
	}
	return strings.Join(parts, ", ")
}

// MaxDelay is the longest that a node's network may be late by, and vary by: later, and
// nothing there takes it for a network any more.
const MaxDelay = 10 * time.Second

func (n Network) check() error {
	switch {
	case n.Delay < 0 || n.Delay > MaxDelay || n.Jitter < 0 || n.Jitter > MaxDelay:
		return fmt.Errorf("delay %s, jitter %s: each must be from 0 to %s", n.Delay, n.Jitter, MaxDelay)
	case !(n.Loss >= 0 && n.Loss <= 1): // nor NaN
		return fmt.Errorf("loss %g%%: must be from 0 to 100", n.Loss*100)
	}
	return nil
}

// SetNetwork makes a node's network bad, or fine again.
func (c *Cluster) SetNetwork(ctx context.Context, node string, n Network) error {
	query := url.Values{
		"off": {strconv.FormatBool(n.Off)}, "cut-from": n.CutFrom, "deaf-to": n.DeafTo,
		"delay": {n.Delay.String()}, "jitter": {n.Jitter.String()}, "loss": {strconv.FormatFloat(n.Loss, 'g', -1, 64)},
	}
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/network?"+query.Encode(), nil)
}

// parseNetwork reads what SetNetwork sends.
func parseNetwork(query url.Values) (n Network, err error) {
	var errs [4]error
	n.CutFrom, n.DeafTo = query["cut-from"], query["deaf-to"]
	n.Off, errs[0] = strconv.ParseBool(query.Get("off"))
	n.Delay, errs[1] = time.ParseDuration(query.Get("delay"))
	n.Jitter, errs[2] = time.ParseDuration(query.Get("jitter"))
	n.Loss, errs[3] = strconv.ParseFloat(query.Get("loss"), 64)
	return n, errors.Join(append(errs[:], n.check())...)
}

func (h *hostProcess) setNetwork(n *node, to Network) error {
	for _, other := range slices.Concat(to.CutFrom, to.DeafTo) {
		if _, err := h.node(other); err != nil {
			return err
		}
	}
	if err := h.lan.spoil(n.Node, to); err != nil {
		return fmt.Errorf("network of %s: %w", n.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.network = to
	return nil
}

// spoil puts a wire between a node's cable and the bridge, or takes it away:
//
//	bridge ── tap ~~ wire ~~ tap ── bridge of two ports ── veth or tap ── eth0 of the node
func (l *lan) spoil(n Node, to Network) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.networks[n.Name]
	l.networks[n.Name] = to
	if _, err := l.links.LinkByName(linkName("node", n)); err != nil {
		return nil // the node is off; its start does it
	}
	if err := l.connect(n); err != nil {
		l.networks[n.Name] = was // or its next start would fail as well
		return errors.Join(err, l.connect(n))
	}
	return nil
}

// linkName is short, and the namespace's own.
func linkName(what string, n Node) string {
	host := n.Address.As4()
	return fmt.Sprintf("%s%d.%d", what, host[2], host[3])
}

// connect joins a node's cable with the cluster's bridge, by way of a wire where its
// network is to be bad. It must be called with the mutex held.
func (l *lan) connect(n Node) error {
	if err := l.dropWire(n); err != nil {
		return err
	}
	to := l.networks[n.Name]
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
	// Without ARP, or this machine would answer for its address on the cluster's bridge.
	if err := errors.Join(l.links.LinkSetARPOff(bridge), l.links.LinkSetUp(bridge)); err != nil {
		return err
	}
	return errors.Join(l.plug(linkName("node", n), own), l.plug(near, own), l.plug(far, bridgeName))
}

// dropWire takes the wire of a node away, if it has one.
func (l *lan) dropWire(n Node) error {
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
func (l *lan) plug(name, bridge string) error {
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

// drops are the frames to and from the nodes that one is cut off from, and those from
// nodes that it is deaf to. What a node sends to all, those that it is cut off from
// hear, too, but their answers get lost.
func (l *lan) drops(to Network) func(frame []byte) bool {
	if to.Off {
		return func([]byte) bool { return true }
	}
	const size = 6 // of an address
	cut, silent := map[[size]byte]bool{}, map[[size]byte]bool{}
	for _, name := range to.CutFrom {
		cut[[size]byte(hardwareAddress(l.plan.Name, name))] = true
	}
	for _, name := range to.DeafTo {
		silent[[size]byte(hardwareAddress(l.plan.Name, name))] = true
	}
	if len(cut)+len(silent) == 0 {
		return nil
	}
	return func(frame []byte) bool {
		receiver, sender := [size]byte(frame[:size]), [size]byte(frame[size:2*size])
		return cut[receiver] || cut[sender] || silent[sender]
	}
}
