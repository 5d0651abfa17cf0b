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

func (n Network) check() error {
	if n.Delay < 0 || n.Jitter < 0 || n.Loss < 0 || n.Loss > 1 {
		return fmt.Errorf("network %s: delay and jitter can't be negative, and loss is a part from 0 to 1", n)
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

// A spoiler is a provisioner that can make networks bad.
type spoiler interface {
	Spoil(n Node, to Network) error
}

func (h *hostProcess) setNetwork(n *node, to Network) error {
	s, ok := h.provisioner.(spoiler)
	if !ok {
		return errors.New("only the network of nodes that are containers can be made bad")
	}
	for _, other := range slices.Concat(to.CutFrom, to.DeafTo) {
		if _, err := h.node(other); err != nil {
			return err
		}
	}
	if err := s.Spoil(n.Node, to); err != nil {
		return fmt.Errorf("network of %s: %w", n.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.network = to
	return nil
}

// Spoil puts a wire between a node's cable and the bridge, or takes it away:
//
//	bridge ── tap ~~ wire ~~ tap ── bridge of two ports ── veth ── eth0 of the node
func (c *containers) Spoil(n Node, to Network) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.networks[n.Name] = to
	if _, err := c.links.LinkByName(linkName("node", n)); err != nil {
		return nil // the node is off; makeLink does it
	}
	return c.connect(n)
}

// linkName is short, and the namespace's own.
func linkName(what string, n Node) string {
	host := n.Address.As4()
	return fmt.Sprintf("%s%d.%d", what, host[2], host[3])
}

// connect joins a node's cable with the cluster's bridge, by way of a wire where its
// network is to be bad. It must be called with the mutex held.
func (c *containers) connect(n Node) error {
	if err := c.dropWire(n); err != nil {
		return err
	}
	to := c.networks[n.Name]
	if to.fine() {
		return c.plug(linkName("node", n), bridgeName)
	}
	own, near, far := linkName("wire", n), linkName("near", n), linkName("far", n)
	var w *wire.Wire
	err := c.keeper.Do(func() (err error) {
		w, err = wire.Open([2]string{near, far}, wire.Conditions{Delay: to.Delay, Jitter: to.Jitter, Loss: to.Loss, Drop: c.drops(to)})
		return err
	})
	if err != nil {
		return err
	}
	c.wires[n.Name] = w
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = own
	if err := c.links.LinkAdd(bridge); err != nil {
		return err
	}
	// Without ARP, or this machine would answer for its address on the cluster's bridge.
	if err := errors.Join(c.links.LinkSetARPOff(bridge), c.links.LinkSetUp(bridge)); err != nil {
		return err
	}
	return errors.Join(c.plug(linkName("node", n), own), c.plug(near, own), c.plug(far, bridgeName))
}

// dropWire takes the wire of a node away, if it has one.
func (c *containers) dropWire(n Node) error {
	var errs []error
	if w := c.wires[n.Name]; w != nil {
		delete(c.wires, n.Name)
		errs = append(errs, w.Close())
	}
	if bridge, err := c.links.LinkByName(linkName("wire", n)); err == nil {
		errs = append(errs, c.links.LinkDel(bridge))
	}
	return errors.Join(errs...)
}

// plug makes a link a port of a bridge.
func (c *containers) plug(name, bridge string) error {
	link, err := c.links.LinkByName(name)
	if err != nil {
		return err
	}
	master, err := c.links.LinkByName(bridge)
	if err != nil {
		return err
	}
	return errors.Join(c.links.LinkSetMaster(link, master), c.links.LinkSetUp(link))
}

// drops are the frames to and from the nodes that one is cut off from, and those from
// nodes that it is deaf to. What a node sends to all, those that it is cut off from
// hear, too, but their answers get lost.
func (c *containers) drops(to Network) func(frame []byte) bool {
	if to.Off {
		return func([]byte) bool { return true }
	}
	const size = 6 // of an address
	cut, silent := map[[size]byte]bool{}, map[[size]byte]bool{}
	for _, name := range to.CutFrom {
		cut[[size]byte(hardwareAddress(c.plan.Name, name))] = true
	}
	for _, name := range to.DeafTo {
		silent[[size]byte(hardwareAddress(c.plan.Name, name))] = true
	}
	if len(cut)+len(silent) == 0 {
		return nil
	}
	return func(frame []byte) bool {
		receiver, sender := [size]byte(frame[:size]), [size]byte(frame[size:2*size])
		return cut[receiver] || cut[sender] || silent[sender]
	}
}
