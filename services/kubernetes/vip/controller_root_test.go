package vip

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/neighbor"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// The elected node has the address, and the neighbours' caches have its MAC
// address. The node gives the address up when its service ends.
func TestTakesAndReleases(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		f.must(f.h.NeighSet(&netlink.Neigh{LinkIndex: f.link().Attrs().Index, IP: address.AsSlice(), HardwareAddr: foreignMAC, State: netlink.NUD_STALE}))
		r := newRig(t, "eth0", address, mine)
		r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder && s.HeldBy == "self" && s.Candidates == 3 })
		if !r.here() {
			t.Errorf("%s isn't on the link", address)
		}
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		eventually.That(t, 5*time.Second, "the other machine knows where the address is", func() error {
			if got := f.neighbour(address); got != l.Attrs().HardwareAddr.String() {
				return fmt.Errorf("it believes that %s is at %s", address, got)
			}
			return nil
		})
		// The address is removed by another program: it is added again.
		f.must(netlink.AddrDel(l, alias(address)))
		eventually.That(t, 5*time.Second, "the address is back", func() error {
			if !r.here() {
				return errors.New("it isn't")
			}
			return nil
		})
		r.end()
		if r.here() {
			t.Errorf("%s is still on the link", address)
		}
		f.must(netlink.LinkDel(l))
	}
}

// A machine that isn't one of the control planes has the address: the node doesn't take
// it, and reports the machine. It takes it when that machine is gone.
func TestForeignMachineOnTheLink(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		p := netip.PrefixFrom(address, address.BitLen())
		f.put(p)
		r := newRig(t, "eth0", address, mine)
		r.status(10*time.Second, "the foreign is named", func(s Status) bool { return s.Conflict == f.mac.String() && !s.Holder })
		if r.here() {
			t.Errorf("%s is on the link, beside the foreign", address)
		}
		if address.Is4() { // once is enough: the pause is long
			f.drop(p)
			r.status(foreignPause+10*time.Second, "this node has the address", func(s Status) bool { return s.Holder && s.Conflict == "" })
		}
		r.end()
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		f.must(netlink.LinkDel(l))
	}
}

// The same machine, but one of the control planes: it isn't the holder in etcd
// any more, and its kernel still answers. The node takes the address.
func TestAFrozenHolderOnTheLink(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		f.put(netip.PrefixFrom(address, address.BitLen()))
		r := newRig(t, "eth0", address, func() view {
			w := mine()
			w.nodes = []node{{Name: "peer", MAC: f.mac.String()}}
			return w
		})
		r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder && s.Conflict == "" })
		r.end()
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		f.must(netlink.LinkDel(l))
	}
}

// With a stale view, it gives the address up to a node that announces itself.
func TestLeavesWhenStale(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		// Another machine answers, so that the node isn't cut off.
		neighbour := netip.MustParseAddr("10.5.0.9")
		if address.Is6() {
			neighbour = netip.MustParseAddr("fd00::9")
		}
		r := newRig(t, "eth0", address, func() view {
			w := mine()
			w.nodes = []node{{Name: "peer", MAC: f.mac.String(), Address: neighbour}}
			return w
		})
		r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
		r.setView(nil)
		r.status(10*time.Second, "it is stale", func(s Status) bool { return s.Holder && !s.Known })
		w, seen := f.listen(address)
		waitForFrame(t, seen, neighbor.Probe, "it asks for another holder")
		f.must(w.Send(neighbor.Announcements(f.mac, address)...))
		r.status(5*time.Second, "it leaves the address", func(s Status) bool { return !s.Holder })
		if r.here() {
			t.Errorf("%s is still on the link", address)
		}
		f.must(w.Close())
		r.end()
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		f.must(netlink.LinkDel(l))
	}
}

// A holder sends keepalives to a control plane that probes it alone, beside its kernel's
// answers; with a stale view, only the kernel answers.
func TestSendsKeepalives(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		r := newRig(t, "eth0", address, func() view {
			w := mine()
			w.nodes = []node{{Name: "peer", MAC: f.mac.String()}}
			return w
		})
		r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		w, seen := f.listen(address)
		check := func() { f.must(w.Send(neighbor.ProbeFrame(f.mac, l.Attrs().HardwareAddr, address))) }
		eventually.That(t, 10*time.Second, "it sends a keepalive", func() error {
			check() // each time: after a delay its view can be stale for a short time
			for len(seen) > 0 {
				if h := <-seen; h.What == neighbor.Keepalive {
					return nil
				}
			}
			return errors.New("it says nothing, or something else")
		})
		r.setView(nil)
		r.status(10*time.Second, "it is stale", func(s Status) bool { return s.Holder && !s.Known })
		for len(seen) > 0 {
			<-seen
		}
		check()
		before := waitForFrame(t, seen, neighbor.Reply, "its kernel answers")
		before = append(before, waitForFrame(t, seen, neighbor.Probe, "it has had time to say more")...) // each second
		if slices.Contains(before, neighbor.Keepalive) {
			t.Error("it sends keepalives with a stale view")
		}
		f.must(w.Close())
		r.end()
		f.must(netlink.LinkDel(l))
	}
}

// An address that can't be removed from the link is tried again: another node
// has it by then.
func TestRemovesUntilItIsGone(t *testing.T) {
	for _, ends := range []bool{false, true} {
		f := cable(t, "eth0")
		var left atomic.Int32
		r := newRig(t, "eth0", shared4, mine, func(k *controller) {
			k.remove = func(a netip.Addr) error {
				if left.Add(-1) >= 0 {
					return netlink.ErrDumpInterrupted
				}
				return remove(a)
			}
		})
		r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
		left.Store(dropTries - 1)
		if ends {
			r.end()
		} else {
			r.setView(func() view { return view{held: true, holder: node{Name: "peer"}} })
			r.status(10*time.Second, "another holds it", func(s Status) bool { return s.HeldBy == "peer" && !s.Holder })
		}
		eventually.That(t, 5*time.Second, "the address is off the link", func() error {
			if r.here() {
				return errors.New("it is still there")
			}
			return nil
		})
		r.end()
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		f.must(netlink.LinkDel(l))
	}
}

// An address left from before a restart is removed at once, from any link.
func TestLeftOver(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		f.must(put(l, address))
		r := newRig(t, "eth0", address, func() view { return view{held: true, holder: node{Name: "peer"}} })
		r.status(10*time.Second, "another holds it", func(s Status) bool { return s.HeldBy == "peer" && !s.Holder })
		if r.here() {
			t.Errorf("%s is still on the link", address)
		}
		r.end()
		f.must(netlink.LinkDel(l))
	}
}

// A machine that sends many frames doesn't keep PID 1 busy, and its frames still have an effect.
func TestManyFrames(t *testing.T) {
	f := cable(t, "eth0")
	var steps atomic.Int32
	r := newRig(t, "eth0", shared4, mine, func(k *controller) {
		k.find = func(link string) (netlink.Link, error) {
			steps.Add(1)
			return netlink.LinkByName(link)
		}
	})
	r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
	w, seen := f.listen(shared4)
	steps.Store(0)
	began, sent := time.Now(), 0
	for ; time.Since(began) < time.Second; sent++ {
		f.must(w.Send(neighbor.ProbeFrame(f.mac, nil, shared4)))
	}
	took := int32(time.Since(began) / frameEvery)
	t.Logf("%d frames, acted upon %d times in %s", sent, steps.Load(), time.Since(began))
	if done := steps.Load(); done > 3*took { // the test's own views and checks are additional
		t.Errorf("%d frames were acted upon %d times within %s", sent, done, time.Since(began))
	}
	eventually.That(t, 10*time.Second, "it answers", func() error {
		f.must(w.Send(neighbor.ProbeFrame(f.mac, nil, shared4)))
		for len(seen) > 0 {
			if h := <-seen; h.What == neighbor.Announcement {
				return nil
			}
		}
		return errors.New("it doesn't announce itself")
	})
	f.must(w.Close())
	r.end()
}

// A panic ends neither the machine nor prevents the removal of the address from the link.
func TestAPanic(t *testing.T) {
	f := cable(t, "eth0")
	l, err := netlink.LinkByName("eth0")
	f.must(err)
	w, err := neighbor.Open(l, shared4, slog.New(slog.DiscardHandler), func(neighbor.Observed) { panic("a frame that nobody thought of") })
	f.must(err)
	other, _ := f.listen(shared4)
	f.must(other.Send(neighbor.ProbeFrame(f.mac, nil, shared4)))
	eventually.That(t, 5*time.Second, "the wire is closed", func() error {
		if !sleep.Closed(w.Dead) {
			return errors.New("it is open")
		}
		return nil
	})
	f.must(w.Close())
	f.must(other.Close())

	var bad atomic.Bool
	r := newRig(t, "eth0", shared4, mine, func(k *controller) {
		k.remove = func(a netip.Addr) error {
			if bad.Swap(false) {
				panic("a state that nobody thought of")
			}
			return remove(a)
		}
	})
	r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
	bad.Store(true)
	r.setView(func() view { return view{held: true, holder: node{Name: "peer"}} })
	eventually.That(t, 5*time.Second, "the address is off the link", func() error {
		if bad.Load() || r.here() {
			return errors.New("it is still there")
		}
		return nil
	})
	r.end()
}

// An address that a DHCP server gave to the node itself is not removed, even if it is
// the shared one: otherwise the node would be cut off each time this service begins.
func TestTheNodesOwnStays(t *testing.T) {
	for _, address := range both {
		f := cable(t, "eth0")
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		own := addr(netip.PrefixFrom(address, address.BitLen()-8))
		f.must(netlink.AddrAdd(l, own))
		r := newRig(t, "eth0", address, func() view { return view{held: true, holder: node{Name: "peer"}} })
		r.status(10*time.Second, "another holds it", func(s Status) bool { return s.HeldBy == "peer" && !s.Holder })
		r.end()
		all, err := netlink.AddrList(l, family(address))
		f.must(err)
		if !slices.ContainsFunc(all, func(a netlink.Addr) bool { return a.IPNet.String() == own.IPNet.String() }) {
			t.Errorf("%s is gone; there are %v", own.IPNet, all)
		}
		f.must(netlink.LinkDel(l))
	}
}

// Packets of the node have its own address, even while it has the shared one,
// because that can move away.
func TestNeverTheSource(t *testing.T) {
	f := cable(t, "eth0")
	l, err := netlink.LinkByName("eth0")
	f.must(err)
	for own, address := range map[string]netip.Addr{"10.5.0.2/24": shared4, "fd00::2/64": shared6} {
		f.must(put(l, address)) // even before the node's own
		prefix := netip.MustParsePrefix(own)
		f.must(netlink.AddrAdd(l, addr(prefix)))
		for _, to := range []string{"10.5.0.9", "fd00::9", "fd00::5:ff"} {
			to := netip.MustParseAddr(to)
			if to.Is4() != address.Is4() {
				continue
			}
			conn, err := net.Dial("udp", netip.AddrPortFrom(to, 9).String())
			f.must(err)
			if got := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(); got != prefix.Addr() {
				t.Errorf("to %s it sends from %s, want %s", to, got, prefix.Addr())
			}
			conn.Close()
		}
	}
}

// After a link was removed and added again, the service listens on it again.
func TestTheLinkComesBack(t *testing.T) {
	f := cable(t, "eth0")
	r := newRig(t, "eth0", shared4, mine)
	r.status(10*time.Second, "this node has the address", func(s Status) bool { return s.Holder })
	l, err := netlink.LinkByName("eth0")
	f.must(err)
	f.must(netlink.LinkDel(l))
	f = cable(t, "eth0")
	f.must(f.h.NeighSet(&netlink.Neigh{LinkIndex: f.link().Attrs().Index, IP: shared4.AsSlice(), HardwareAddr: foreignMAC, State: netlink.NUD_STALE}))
	eventually.That(t, 10*time.Second, "the address is on the new link, and its neighbour knows", func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if there, err := has(l, shared4); err != nil || !there {
			return fmt.Errorf("it isn't there (%v)", err)
		}
		if got := f.neighbour(shared4); got != l.Attrs().HardwareAddr.String() {
			return fmt.Errorf("its neighbour believes that it is at %s", got)
		}
		return nil
	})
	r.end()
}

// A node whose cable is out can't have the address, and evicts nobody who has it.
func TestNoCandidateWithoutACable(t *testing.T) {
	f := cable(t, "eth0")
	r := newRig(t, "eth0", shared4, mine)
	candidate := func() bool {
		l, err := netlink.LinkByName("eth0")
		f.must(err)
		return r.self(l, orders{candidate: true}) != nil
	}
	if !candidate() {
		t.Error("with a cable, it isn't a candidate")
	}
	f.must(f.h.LinkSetDown(f.link()))
	eventually.That(t, 5*time.Second, "it is no candidate any more", func() error {
		if candidate() {
			return errors.New("it is")
		}
		return nil
	})
}
