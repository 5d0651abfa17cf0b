package network

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Conditions are faults of a node's network. The zero value is a network without faults.
type Conditions struct {
	// Off cuts the node off from all others and from this machine. The node does not notice:
	// its link is up.
	Off bool
	// CutFrom are nodes whose frames it does not receive, and that do not receive its frames.
	CutFrom []string
	// DeafTo are nodes whose frames it does not receive. They receive its frames.
	DeafTo []string
	Delay  time.Duration // in each direction
	Jitter time.Duration // at most so much is added to Delay
	Loss   float64       // part of the frames that are lost, in each direction, 0 to 1
}

func (c Conditions) fine() bool {
	return !c.Off && len(c.CutFrom) == 0 && len(c.DeafTo) == 0 && c.Delay == 0 && c.Jitter == 0 && c.Loss == 0
}

func (c Conditions) String() string {
	var parts []string
	add := func(yes bool, format string, args ...any) {
		if yes {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(c.Off, "cut off")
	add(len(c.CutFrom) > 0, "cut off from %s", strings.Join(c.CutFrom, " "))
	add(len(c.DeafTo) > 0, "deaf to %s", strings.Join(c.DeafTo, " "))
	add(c.Delay > 0, "delay %s", c.Delay)
	add(c.Jitter > 0, "jitter %s", c.Jitter)
	add(c.Loss > 0, "loss %g%%", c.Loss*100)
	if parts == nil {
		return "fine"
	}
	return strings.Join(parts, ", ")
}

// MaxDelay is the largest delay and the largest jitter. With a longer one, no program can
// use the network.
const MaxDelay = 10 * time.Second

// Check returns an error that names values out of range.
func (c Conditions) Check() error {
	switch {
	case c.Delay < 0 || c.Delay > MaxDelay || c.Jitter < 0 || c.Jitter > MaxDelay:
		return fmt.Errorf("delay %s, jitter %s: each must be from 0 to %s", c.Delay, c.Jitter, MaxDelay)
	case !(c.Loss >= 0 && c.Loss <= 1): // nor NaN
		return fmt.Errorf("loss %g%%: must be from 0 to 100", c.Loss*100)
	}
	return nil
}

// SetConditions puts a wire between a node's cable and the bridge, or removes it:
//
//	bridge ── tap ~~ wire ~~ tap ── bridge of two ports ── veth or tap ── eth0 of the node
func (l *LAN) SetConditions(n Node, to Conditions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.conditions[n.Name]
	l.conditions[n.Name] = to
	if _, err := l.links.LinkByName(linkName("node", n)); err != nil {
		return nil // the node is off; Tap and Veth use the conditions
	}
	if err := l.connect(n); err != nil {
		l.conditions[n.Name] = was // or its next start would fail as well
		return errors.Join(err, l.connect(n))
	}
	return nil
}

// drops selects the frames to and from the nodes that a node is cut off from, and those from
// nodes that it is deaf to. Nodes that it is cut off from receive its broadcasts, but their
// answers are dropped.
func (l *LAN) drops(to Conditions) func(frame []byte) bool {
	if to.Off {
		return func([]byte) bool { return true }
	}
	const size = 6 // of an address
	cut, silent := map[[size]byte]bool{}, map[[size]byte]bool{}
	for _, name := range to.CutFrom {
		cut[[size]byte(HardwareAddress(l.config.Cluster, name))] = true
	}
	for _, name := range to.DeafTo {
		silent[[size]byte(HardwareAddress(l.config.Cluster, name))] = true
	}
	if len(cut)+len(silent) == 0 {
		return nil
	}
	return func(frame []byte) bool {
		receiver, sender := [size]byte(frame[:size]), [size]byte(frame[size:2*size])
		return cut[receiver] || cut[sender] || silent[sender]
	}
}
