//go:build kernel

package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
)

func nameOf(t *testing.T, n *node) string {
	n.up(90 * time.Second)
	h, err := Hostnames.Get(n.store, HostnameID)
	if err != nil {
		t.Fatal(err)
	}
	n.stop()
	return h.Spec
}

// No configured name. Between two boots a card is added that comes first by its name. The name is kept, as the address
// is (node-address on STATE): it is the name of the Node object and of the etcd member.
func TestNameIsKeptWithAnotherCard(t *testing.T) {
	p, dir := newPeer(t), t.TempDir()
	p.wire("eth1", "far1", "10.52.1.1/24")
	stop := p.dnsmasq("--interface=far1", "--dhcp-range=10.52.1.50,10.52.1.60,1h")
	first := nameOf(t, startNodeIn(t, dir, config.Network{}))
	stop()
	p.wire("eth0", "far0", "10.52.0.1/24")
	p.dnsmasq("--interface=far0", "--interface=far1", "--dhcp-range=10.52.0.50,10.52.0.60,1h", "--dhcp-range=10.52.1.50,10.52.1.60,1h")
	if second := nameOf(t, startNodeIn(t, dir, config.Network{})); second != first {
		t.Errorf("the node was %s, and is %s after a reboot with one more card", first, second)
	}
}

// The DHCP server sends another name at the next boot, then none (a new router).
// The same name, or at least a line on the console about the change.
func TestNameIsKeptWithAnotherServer(t *testing.T) {
	p, dir := newPeer(t), t.TempDir()
	p.wire("eth0", "far0", "10.53.0.1/24")
	var names []string
	for _, o := range []string{"--dhcp-option-force=12,node7", "--dhcp-option-force=12,node8", "--dhcp-option-force=252,x"} {
		stop := p.dnsmasq("--interface=far0", "--dhcp-range=10.53.0.50,10.53.0.60,1h", o)
		n := startNodeIn(t, dir, config.Network{})
		names = append(names, nameOf(t, n))
		status, err := Statuses.Get(n.store, ID)
		if told := strings.Contains(strings.Join(status.Spec.Problems, ","), `the name "node8" isn't used: the node is node7`); err != nil || told != strings.HasSuffix(o, "node8") {
			t.Errorf("with %s, the problems are %q (%v)", o, status.Spec.Problems, err)
		}
		stop()
	}
	if names[1] != names[0] || names[2] != names[0] {
		t.Errorf("names at three boots: %q", names)
	}
}

// "localhost" (and localhost.localdomain) isn't a name of a node: every machine of that network would have it.
func TestLocalhostIsNoName(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.36.2.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.36.2.50,10.36.2.60,1h", "--dhcp-option-force=12,localhost")
	if got := nameOf(t, startNode(t, config.Network{})); strings.HasPrefix(got, "localhost") {
		t.Errorf("the node calls itself %s", got)
	}
}

// A name that can't be used (an underscore, a blank, more than 63 bytes) is told of on the console, with the name that
// is used instead; of a long one with dots, the first label would do.
func TestUnusableNameIsTold(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.36.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.36.0.50,10.36.0.60,1h", "--dhcp-option-force=12,rack_3_node")
	n := startNode(t, config.Network{})
	got := nameOf(t, n)
	if !strings.Contains(n.console.String(), "rack_3_node") {
		t.Errorf("named %s; the console says %q", got, n.console)
	}
}

// Programs ask three name servers; the console names the first one that they don't ask. Pods' file names the node's own
// resolver.
func TestFourNameServersAreTold(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.36.3.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.36.3.50,10.36.3.60,1h", "--dhcp-option-force=6,10.36.3.1,10.36.3.2,10.36.3.3,10.36.3.4")
	n := startNode(t, config.Network{})
	n.up(90 * time.Second)
	if !strings.Contains(n.console.String(), "not 10.36.3.4") {
		t.Errorf("the console says %q", n.console)
	}
	for file, want := range map[string]string{
		"resolv.conf":      "nameserver 10.36.3.1\nnameserver 10.36.3.2\nnameserver 10.36.3.3\n",
		"resolv.pods.conf": "nameserver 169.254.116.108\n",
	} {
		if text, err := os.ReadFile(filepath.Join(n.etc, file)); err != nil || string(text) != want {
			t.Errorf("%s is %q (%v), want %q", file, text, err, want)
		}
	}
}
