package qemu

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// S-106, S-107: control planes are servers on port 51111, and every node connects to
// every control plane.
func TestS106WireGuard(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	o := Options{Name: "c", ControlPlanes: 2, Workers: 2, WireGuard: netip.MustParsePrefix("10.1.0.0/24")}
	for _, provisioner := range []string{QEMU, Container} {
		p, err := newPlan(o, Choice{Name: provisioner})
		if err != nil {
			t.Fatal(err)
		}
		f, err := configurations(p, o, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		links := map[string]config.Interface{}
		names := map[string]string{} // by public key
		for _, n := range p.Nodes {
			c, _, err := config.Load(n.Name, f.nodes[n.Name])
			if err != nil {
				t.Fatal(err)
			}
			own := c.Machine.Network.Interfaces
			if len(own) != 2 || own[0].Name != "eth0" || own[0].DHCP != (provisioner == QEMU) {
				t.Fatalf("%s: interfaces %+v", n.Name, own)
			}
			links[n.Name] = own[1]
			key, err := wgtypes.ParseKey(string(own[1].WireGuard.PrivateKey))
			if err != nil {
				t.Fatal(err)
			}
			names[key.PublicKey().String()] = n.Name
		}
		var got []string
		for _, n := range p.Nodes {
			l := links[n.Name]
			got = append(got, fmt.Sprintf("%s %s %s %d", n.Name, l.Name, l.CIDR, l.WireGuard.ListenPort))
			for _, peer := range l.WireGuard.Peers {
				got = append(got, fmt.Sprintf("  %s %q %s %s", names[peer.PublicKey], peer.Endpoint, peer.AllowedIPs, peer.PersistentKeepalive))
			}
		}
		want := []string{
			"c-controlplane-1 wg0 10.1.0.1/24 51111",
			`  c-controlplane-2 "10.5.0.3:51111" [10.1.0.2/32] 5s`, `  c-worker-1 "" [10.1.0.3/32] 0s`, `  c-worker-2 "" [10.1.0.4/32] 0s`,
			"c-controlplane-2 wg0 10.1.0.2/24 51111",
			`  c-controlplane-1 "10.5.0.2:51111" [10.1.0.1/32] 5s`, `  c-worker-1 "" [10.1.0.3/32] 0s`, `  c-worker-2 "" [10.1.0.4/32] 0s`,
			"c-worker-1 wg0 10.1.0.3/24 0",
			`  c-controlplane-1 "10.5.0.2:51111" [10.1.0.1/32] 5s`, `  c-controlplane-2 "10.5.0.3:51111" [10.1.0.2/32] 5s`,
			"c-worker-2 wg0 10.1.0.4/24 0",
			`  c-controlplane-1 "10.5.0.2:51111" [10.1.0.1/32] 5s`, `  c-controlplane-2 "10.5.0.3:51111" [10.1.0.2/32] 5s`,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", provisioner, diff)
		}
	}
}
