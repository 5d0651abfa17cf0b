//go:build kernel

package network

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A link has its address within a second after its cable is in, from a server that answers at once, although the node
// asks other hosts for the address. The node is up soon after that.
func TestAnAddressIsThereAtOnce(t *testing.T) {
	p := newPeer(t)
	p.cable("eth0", "far-eth0")
	p.do(func() { p.address("far-eth0", "10.67.0.1/24") })
	p.shortServer("far-eth0", "10.67.0.1", "10.67.0.77", 3600)
	pace := eventually.Measure()
	n := startNode(t, config.Network{})
	eventually.That(t, 10*time.Second, "eth0 is up, without a carrier", func() error {
		if o, err := Links.Get(n.store, "eth0"); err != nil || o.Spec.State != "no carrier" {
			return fmt.Errorf("it is %+v (%v)", o.Spec, err)
		}
		return nil
	})
	began := time.Now()
	p.plug("eth0", true)
	eventually.That(t, 10*time.Second, "eth0 has its address", func() error {
		got, err := addressesOf("eth0")
		if err == nil && !slices.Contains(got, "10.67.0.77/24") {
			err = fmt.Errorf("it has %v", got)
		}
		return err
	})
	there := time.Now()
	if err := pace.Kept(began, there, time.Second); err != nil {
		t.Errorf("until the address: %v", err)
	}
	n.up(5 * time.Second)
	t.Logf("the address is there after %s, the node is up after %s", there.Sub(began), time.Since(began))
}

// One address of a card changes, in another network or in the same one, and no packet of the others is lost.
func TestNoPacketIsLostOnOtherAddresses(t *testing.T) {
	// As boot/settings.yaml has it: else the kernel removes the other addresses of a network with its first one.
	if err := os.WriteFile("/proc/sys/net/ipv4/conf/all/promote_secondaries", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	p := newPeer(t)
	p.wire("eth0", "far0", "10.69.0.1/24")
	var far *net.UDPConn
	p.do(func() {
		var err error
		if far, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(10, 69, 0, 1), Port: 7}); err != nil {
			t.Error(err)
		}
	})
	defer far.Close()
	go func() {
		packet := make([]byte, 64)
		for {
			size, from, err := far.ReadFrom(packet)
			if err != nil {
				return
			}
			_, _ = far.WriteTo(packet[:size], from)
		}
	}()
	cidrs := func(all ...string) (c config.Network) {
		for _, a := range all {
			c.Interfaces = append(c.Interfaces, config.Interface{Name: "eth0", CIDR: prefix(a)})
		}
		return c
	}
	n := startNode(t, cidrs("10.69.0.2/24", "10.69.0.3/24", "10.70.0.2/24"))
	n.up(10 * time.Second)
	flow, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(10, 69, 0, 3)}, &net.UDPAddr{IP: net.IPv4(10, 69, 0, 1), Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Close()
	var answered atomic.Int64
	go func() {
		for packet := make([]byte, 64); ; {
			if _, err := flow.Read(packet); err != nil {
				return
			}
			answered.Add(1)
		}
	}()
	stop, sent := make(chan struct{}), make(chan int64)
	go func() {
		defer close(sent)
		for count, tick := int64(0), time.NewTicker(2*time.Millisecond); ; count++ {
			select {
			case <-stop:
				tick.Stop()
				sent <- count
				return
			case <-tick.C:
				if _, err := flow.Write([]byte("packet")); err != nil {
					t.Errorf("send packet %d: %v", count, err)
				}
			}
		}
	}()
	for _, change := range []struct {
		what, address string
		to            config.Network
	}{
		{"in another network", "10.70.0.9/24", cidrs("10.69.0.2/24", "10.69.0.3/24", "10.70.0.9/24")},
		{"the first of the same network", "10.69.0.9/24", cidrs("10.69.0.9/24", "10.69.0.3/24", "10.70.0.9/24")},
	} {
		before, began := answered.Load(), time.Now()
		n.configure(change.to)
		eventually.That(t, 5*time.Second, change.what+" the address is "+change.address, func() error {
			all, err := addressesOf("eth0")
			if err == nil && (len(all) != 3 || !slices.Contains(all, change.address)) {
				err = fmt.Errorf("it has %v", all)
			}
			return err
		})
		t.Logf("%s it took %s, of which the test's own pauses are up to a half; 50ms are aimed at", change.what, time.Since(began))
		eventually.That(t, 5*time.Second, "packets go on", func() error {
			if got := answered.Load() - before; got < 50 {
				return fmt.Errorf("%d were answered", got)
			}
			return nil
		})
	}
	close(stop)
	all := <-sent
	eventually.That(t, 5*time.Second, "each packet is answered", func() error {
		if got := answered.Load(); got != all {
			return fmt.Errorf("%d of %d were answered", got, all)
		}
		return nil
	})
}
