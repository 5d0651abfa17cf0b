package network

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gopkg.in/yaml.v3"
)

// S-108: the status has what `wg show` prints, and not the private key.
func TestS108WireGuardStatus(t *testing.T) {
	t.Parallel()
	private, err := wgtypes.ParseKey("yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=")
	if err != nil {
		t.Fatal(err)
	}
	shared := wgtypes.Key{31: 7}
	at := time.Date(2026, 11, 24, 5, 0, 0, 0, time.UTC)
	s := wireguardStatus(&wgtypes.Device{
		Name: "wg0", PrivateKey: private, PublicKey: wgtypes.Key{31: 1}, ListenPort: 51111, FirewallMark: 1,
		Peers: []wgtypes.Peer{
			{
				PublicKey: wgtypes.Key{31: 2}, PresharedKey: shared, Endpoint: &net.UDPAddr{IP: net.IPv4(192, 0, 2, 9).To4(), Port: 51820},
				PersistentKeepaliveInterval: 5 * time.Second, LastHandshakeTime: at, ReceiveBytes: 92, TransmitBytes: 180,
				AllowedIPs: []net.IPNet{{IP: net.IPv4(10, 1, 0, 2).To4(), Mask: net.CIDRMask(32, 32)}, {IP: net.ParseIP("2001:db8::"), Mask: net.CIDRMask(64, 128)}},
			},
			{PublicKey: wgtypes.Key{31: 3}},
		},
	})
	const want = `publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=
listenPort: 51111
firewallMark: 1
latestHandshake: 2026-11-24T05:00:00Z
peers:
    - publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAI=
      endpoint: 192.0.2.9:51820
      allowedIPs:
        - 10.1.0.2/32
        - 2001:db8::/64
      latestHandshake: 2026-11-24T05:00:00Z
      received: 92
      sent: 180
      persistentKeepaliveInterval: 5s
    - publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAM=
      allowedIPs: []
      received: 0
      sent: 0
`
	got, err := yaml.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for _, secret := range []wgtypes.Key{private, shared} {
		if strings.Contains(string(got), secret.String()) {
			t.Errorf("the status shows the key %s", secret)
		}
	}
}

// A peer that has keepalives and is silent is a problem of the peer, and one whose name isn't found.
func TestS108WireGuardPeersHaveProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const key = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk="
		silent, quiet, unknown := wgtypes.Key{31: 1}, wgtypes.Key{31: 2}, wgtypes.Key{31: 3}
		private, err := wgtypes.ParseKey(key)
		if err != nil {
			t.Fatal(err)
		}
		has := &wgtypes.Device{PrivateKey: private, Peers: []wgtypes.Peer{{PublicKey: silent, PersistentKeepaliveInterval: 25 * time.Second}, {PublicKey: quiet}, {PublicKey: unknown}}}
		o := &owner{
			Daemon: New(Options{wireguard: func(string, *wgtypes.Config) (*wgtypes.Device, error) { return has, nil }}), tunnels: map[string]WireGuardStatus{},
			named: map[string]lookup{"vpn.example.org": {err: errors.New("no such host"), at: time.Now().Add(time.Hour)}},
		}
		wg0 := &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "wg0", Index: 7}}
		spec := &config.WireGuard{PrivateKey: key, Peers: []config.WireGuardPeer{
			{PublicKey: silent.String(), PersistentKeepalive: 25 * time.Second}, {PublicKey: quiet.String()},
			{PublicKey: unknown.String(), Endpoint: "vpn.example.org:51820"},
		}}
		const notFound = "find the peer vpn.example.org: no such host"
		look := func(want ...string) {
			t.Helper()
			if err := o.key(context.Background(), wg0, spec); err == nil || err.Error() != notFound {
				t.Errorf("the problem of the link is %v", err)
			}
			if diff := cmp.Diff(want, resource.Problems(o.tunnels["wg0"])); diff != "" {
				t.Error(diff)
			}
		}
		look(notFound)
		time.Sleep(silentAfter - time.Second)
		look(notFound) // it has had its keys for a short time
		time.Sleep(2 * time.Second)
		look("the peer "+silent.String()+" has been silent for more than 3m0s", notFound)
		has.Peers[0].LastHandshakeTime = time.Now()
		look(notFound)
	})
}
