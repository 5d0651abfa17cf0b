//go:build kernel

package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// lldpd runs Debian's daemon on the peer, with a frame each second, until the test ends or stop is called.
func (p *peer) lldpd(args ...string) (stop func()) {
	p.t.Helper()
	cmd := exec.Command("lldpd", append([]string{"-d", "-O", "/dev/null"}, args...)...)
	out := &syncBuffer{}
	cmd.Stdout, cmd.Stderr = out, out
	p.do(func() {
		if err := cmd.Start(); err != nil {
			p.t.Errorf("start lldpd (package lldpd): %v", err)
		}
	})
	cmd.WaitDelay = 10 * time.Second
	stop = sync.OnceFunc(func() {
		cmd.Process.Signal(os.Interrupt)
		cmd.Wait()
	})
	p.t.Cleanup(func() {
		stop()
		if p.t.Failed() {
			p.t.Logf("lldpd: %s", out)
		}
	})
	eventually.That(p.t, 20*time.Second, "lldpd is configured", func() error {
		ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Second)
		defer cancel()
		text, err := exec.CommandContext(ctx, "lldpcli", "configure", "lldp", "tx-interval", "1").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, text)
		}
		return nil
	})
	return stop
}

// A switch (Debian's lldpd) tells the port of each card, and that it goes. Nothing is heard on an ignored card, and a
// link without a carrier has no neighbour.
func TestNeighborsOfLinks(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.97.0.1/24")
	p.wire("eth1", "far1", "10.97.1.1/24")
	p.wire("eth2", "far2", "10.97.2.1/24")
	stop := p.lldpd("-C", "far0", "-I", "far0,far1,far2", "-S", "switch-1", "-M", "4")
	n := startNode(t, config.Network{Interfaces: []config.Interface{static("eth0", "10.97.0.2/24", 0), static("eth1", "10.97.1.2/24", 0), {Name: "eth2", Ignore: true}}})
	n.up(10 * time.Second)
	linkUp(t, "eth2")
	var chassis string
	p.do(func() {
		if l, err := netlink.LinkByName("far0"); err == nil {
			chassis = l.Attrs().HardwareAddr.String()
		}
	})
	has := func(what string, want map[string]string) { // the ports by link
		t.Helper()
		eventually.That(t, 30*time.Second, what, func() error {
			got, wrong := map[string]string{}, error(nil)
			for _, o := range LinkNeighbors.List(n.store) {
				s := o.Spec
				got[s.Link] = s.Port
				if o.ID != s.Link+"-"+s.Chassis || s.Chassis != chassis || s.System == "" || !s.Expires.After(s.Heard) {
					wrong = errors.Join(wrong, fmt.Errorf("%s: %+v, and the switch is %s", o.ID, s, chassis))
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				return fmt.Errorf("the neighbours' ports are %v", got)
			}
			return wrong
		})
	}
	ports := map[string]string{}
	p.do(func() {
		for _, end := range []string{"0", "1"} {
			if l, err := netlink.LinkByName("far" + end); err == nil {
				ports["eth"+end] = l.Attrs().HardwareAddr.String()
			}
		}
	})
	has("each card has its neighbour", ports)
	if _, err := resource.Resolve("lldp"); err != nil {
		t.Errorf("gbctl get lldp: %v", err)
	}
	eth1, err := netlink.LinkByName("eth1")
	if err == nil {
		err = netlink.LinkDel(eth1)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(ports, "eth1")
	has("a link that is gone has no neighbour", ports)
	stop()
	has("a switch that says farewell is gone", map[string]string{})
}
