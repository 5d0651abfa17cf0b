//go:build kernel

package network

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/ipc"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// userspace is WireGuard's own program for kernels that have none, on a link that is there. It lasts until the test
// ends.
func userspace(t *testing.T, link string) {
	t.Helper()
	wire, err := tun.CreateTUN(link, device.DefaultMTU)
	if err != nil {
		t.Fatal(err)
	}
	d := device.NewDevice(wire, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, link+" "))
	t.Cleanup(d.Close)
	file, err := ipc.UAPIOpen(link)
	if err != nil {
		t.Fatal(err)
	}
	control, err := ipc.UAPIListen(link, file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { control.Close() })
	go func() {
		for {
			c, err := control.Accept()
			if err != nil {
				return
			}
			go d.IpcHandle(c)
		}
	}()
}

// S-105: preshared keys and the firewall mark, as wg(8) shows them. They are changed and taken away live, and no status
// has a key.
func TestS105WireGuardPresharedKeyAndMark(t *testing.T) {
	newPeer(t).wire("eth0", "far0", "10.100.0.1/24")
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.link = func(v virtual, _ int) netlink.Link {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = v.name
			return &netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR}
		}
	}
	var keys []string
	for range 5 {
		k, err := wgtypes.GeneratePrivateKey()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k.String())
	}
	private, one, two := config.Secret(keys[0]), keys[1], keys[2]
	peers := []config.WireGuardPeer{{PublicKey: one, AllowedIPs: []netip.Prefix{prefix("10.101.0.1/32")}}, {PublicKey: two}}
	configure := func(mark uint32, shared ...string) {
		for i := range peers {
			peers[i].PresharedKey = config.Secret(shared[i])
		}
		n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.100.0.2/24", 0), {Name: "wg0", CIDR: prefix("10.101.0.2/24"),
			WireGuard: &config.WireGuard{PrivateKey: private, ListenPort: 51111, FirewallMark: mark, Peers: append([]config.WireGuardPeer{}, peers...)}}}})
	}
	configure(0x20, keys[3], "")
	n.run(cards)
	eventually.That(t, 10*time.Second, "wg0 is made", func() error { _, err := netlink.LinkByName("wg0"); return err })
	userspace(t, "wg0")
	n.up(20 * time.Second)
	shows := func(mark, first, second string) {
		t.Helper()
		eventually.That(t, 20*time.Second, "wg shows the mark "+mark, func() error {
			out, err := exec.Command("wg", "show", "wg0", "dump").CombinedOutput()
			if err != nil {
				return fmt.Errorf("wg (package wireguard-tools): %w: %s", err, out)
			}
			got := map[string]string{} // by public key
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			for _, line := range lines[1:] {
				f := strings.Split(line, "\t")
				got[f[0]] = f[1]
			}
			if f := strings.Split(lines[0], "\t"); f[0] != keys[0] || f[3] != mark || got[one] != first || got[two] != second {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
	}
	shows("0x20", keys[3], "(none)")
	configure(0x21, keys[4], keys[3])
	shows("0x21", keys[4], keys[3])
	configure(0, "", keys[3])
	shows("off", "(none)", keys[3])
	if out, err := exec.Command("wg", "set", "wg0", "fwmark", "0x99").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	shows("off", "(none)", keys[3]) // what another program changes is set again
	if out, err := exec.Command("wg", "set", "wg0", "listen-port", "51112", "peer", one, "allowed-ips", "10.101.9.0/24").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventually.That(t, 20*time.Second, "the port and the allowed addresses are set again", func() error {
		out, err := exec.Command("wg", "show", "wg0", "dump").CombinedOutput()
		if text := string(out); err != nil || !strings.Contains(text, "\t51111\toff") || !strings.Contains(text, "\t10.101.0.1/32\t") {
			return fmt.Errorf("%s (%v)", out, err)
		}
		return nil
	})
	o, err := WireGuardStatuses.Get(n.store, "wg0")
	if text := fmt.Sprintf("%+v", o.Spec); err != nil || strings.Contains(text, keys[0]) || strings.Contains(text, keys[3]) || len(o.Spec.Peers) != 2 {
		t.Errorf("the status is %s (%v)", text, err)
	}
}
