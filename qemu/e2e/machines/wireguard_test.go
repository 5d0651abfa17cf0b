//go:build e2e && long

package machines

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"gopkg.in/yaml.v3"
)

const (
	vpnBoot = 60 * time.Second // of two machines at the same time on two processors
	vpnMTU  = 1380             // the kernel's default is 1420
	// signed is how many bytes at least the request for a certificate and its answer have, each.
	signed = 1000
)

// linkStatus is a WireGuardStatus as users see it.
type linkStatus struct {
	PublicKey  string `yaml:"publicKey"`
	ListenPort int    `yaml:"listenPort"`
	Peers      []struct {
		PublicKey           string    `yaml:"publicKey"`
		Endpoint            string    `yaml:"endpoint"`
		AllowedIPs          []string  `yaml:"allowedIPs"`
		LatestHandshake     time.Time `yaml:"latestHandshake"`
		Received, Sent      int64
		PersistentKeepalive time.Duration `yaml:"persistentKeepaliveInterval"`
	}
}

// S-062, S-105, S-107, S-108: a worker that knows its cluster only by the control plane's address
// in the virtual private network gets its certificate from there. Kubernetes isn't needed: the
// control plane waits for its bootstrap.
func TestWireGuard(t *testing.T) {
	c, m := e2etest.Start(t, "wireguard", qemu.QEMU, e2etest.Nodes(1, 1), func(o *qemu.Options) {
		o.MemoryMiB, o.DiskGiB, o.WireGuard = 1536, 4, netip.MustParsePrefix("10.1.0.0/24")
		o.Patches = [][]byte{[]byte("cluster: {controlPlane: {endpoint: https://10.1.0.1:6443}}\n")}
		o.ControlPlanePatches = [][]byte{[]byte(fmt.Sprintf(
			"machine: {type: controlplane, network: {interfaces: [{interface: wg0, mtu: %d}]}}\n", vpnMTU))}
		o.WorkerPatches = [][]byte{[]byte("machine: {kubelet: {nodeIP: {validSubnets: [10.1.0.0/24]}}}\n")}
	})
	server, worker := c.Nodes[0], c.Nodes[1]
	private := map[string]wgtypes.Key{}
	for _, n := range c.Nodes {
		private[n.Name] = wireguardKey(t, c, n.Name)
	}

	var at, of linkStatus
	c.Eventually(vpnBoot, "the worker's machine API serves with a certificate that came through the tunnel", func() (err error) {
		if at, err = vpnStatus(c, server.Name); err == nil {
			of, err = vpnStatus(c, worker.Name)
		}
		if err == nil && (at.Peers[0].Received < signed || at.Peers[0].Sent < signed) {
			err = errors.New("the control plane has seen no request")
		}
		return err
	})
	m.Reached("the worker's machine API serves with a certificate that came through the tunnel")

	// Endpoints of workers are the addresses of their packets, from a port that the kernel chose.
	endpoint, err := netip.ParseAddrPort(at.Peers[0].Endpoint)
	if err != nil || endpoint.Addr() != worker.Address || int(endpoint.Port()) != of.ListenPort {
		t.Errorf("the control plane has the worker at %q (%v), which listens on port %d", at.Peers[0].Endpoint, err, of.ListenPort)
	}
	if at.ListenPort != 51111 || at.Peers[0].PersistentKeepalive != 0 {
		t.Errorf("the control plane: %+v", at)
	}
	if peer := of.Peers[0]; peer.Endpoint != server.Address.String()+":51111" || peer.PersistentKeepalive != 5*time.Second {
		t.Errorf("the worker: %+v", of)
	}
	for _, tt := range []struct {
		own, other qemu.Node
		status     linkStatus
		address    string
		allowed    string
		mtu        int
	}{
		{server, worker, at, "10.1.0.1/24", "10.1.0.2/32", vpnMTU},
		{worker, server, of, "10.1.0.2/24", "10.1.0.1/32", 1420},
	} {
		peer := tt.status.Peers[0]
		if len(tt.status.Peers) != 1 || tt.status.PublicKey != private[tt.own.Name].PublicKey().String() ||
			peer.PublicKey != private[tt.other.Name].PublicKey().String() || len(peer.AllowedIPs) != 1 || peer.AllowedIPs[0] != tt.allowed {
			t.Errorf("%s: %+v", tt.own.Name, tt.status)
		}
		if peer.LatestHandshake.IsZero() || peer.Received < signed || peer.Sent < signed {
			t.Errorf("%s: no handshake, or nothing went through the tunnel: %+v", tt.own.Name, peer)
		}
		// By the node's name: the worker's certificate isn't for its address in the other network.
		if got := c.Gbctl("-n", tt.own.Name, "read", "/sys/class/net/wg0/mtu"); got != fmt.Sprintln(tt.mtu) {
			t.Errorf("MTU of %s: %s", tt.own.Name, got)
		}
		if got := c.Gbctl("-n", tt.own.Name, "get", "nodeaddresses", "-o", "yaml"); !strings.Contains(got, "- "+tt.address+"\n") {
			t.Errorf("addresses of %s:\n%s", tt.own.Name, got)
		}
		for _, output := range []string{"yaml", "table"} {
			if got := c.Gbctl("-n", tt.own.Name, "get", "wireguardstatuses", "-o", output); strings.Contains(got, private[tt.own.Name].String()) {
				t.Errorf("%s shows its private key:\n%s", tt.own.Name, got)
			}
		}
	}
}

// wireguardKey is the private key in a node's configuration.
func wireguardKey(t *testing.T, c *e2etest.Cluster, node string) wgtypes.Key {
	t.Helper()
	text, err := os.ReadFile(c.Configuration(node))
	if err != nil {
		t.Fatal(err)
	}
	cfg, _, err := config.Load(node, text)
	if err != nil {
		t.Fatal(err)
	}
	interfaces := cfg.Machine.Network.Interfaces
	key, err := wgtypes.ParseKey(string(interfaces[len(interfaces)-1].WireGuard.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func vpnStatus(c *e2etest.Cluster, node string) (linkStatus, error) {
	out, err := c.TryGbctl("-n", node, "get", "wireguardstatuses", "wg0", "-o", "yaml")
	if err != nil {
		return linkStatus{}, err
	}
	var object struct{ Spec linkStatus }
	if err := yaml.Unmarshal([]byte(out), &object); err != nil {
		return linkStatus{}, err
	}
	if len(object.Spec.Peers) == 0 {
		return linkStatus{}, fmt.Errorf("wg0 of %s has no peer:\n%s", node, out)
	}
	return object.Spec, nil
}
