//go:build e2e && long

package machines

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/vm"
)

// A machine whose configuration lists a second card, with nobody behind it: the node serves, says what is missing, and
// has a name in its files.
func TestSilentCard(t *testing.T) {
	c, _ := e2etest.Start(t, "silent", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.Hardware = []vm.Hardware{{Silent: vm.After}}
		o.ControlPlanePatches = [][]byte{[]byte("machine: {network: {interfaces: [{interface: eth1, dhcp: true}]}}\n")}
	})
	node := c.Nodes[0].Address.String()
	c.Eventually(3*time.Minute, "the problem is told", func() error {
		status, err := c.TryGbctl("get", "networkstatuses", "-n", node)
		if err == nil && !strings.Contains(status, `waiting for DHCP answer on "eth1"`) {
			err = errors.New(status)
		}
		return err
	})
	for file, want := range map[string]string{"/etc/hosts": c.Nodes[0].Address.String(), "/etc/hostname": c.Nodes[0].Name} {
		if text := c.Gbctl("read", "-n", node, file); !strings.Contains(text, want) {
			t.Errorf("%s: %q", file, text)
		}
	}
	if links := c.Gbctl("get", "links", "-n", node); !strings.Contains(links, "eth1") {
		t.Errorf("links: %s", links)
	}
}
