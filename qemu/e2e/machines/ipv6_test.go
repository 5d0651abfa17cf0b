//go:build e2e && long

package machines

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
)

// A network without IPv4, whose router says that DHCPv6 has the addresses. A machine whose configuration has no network boots a medium there,
// installs itself, starts from its disk, and is a Ready node.
func TestIPv6OnlyInQEMU(t *testing.T) {
	c, m := e2etest.Start(t, "six-qemu", qemu.QEMU, e2etest.Nodes(1, 0), e2etest.Medium(t, media.Options{Args: e2etest.SerialArgs(), Version: "v1.0.0"}),
		func(o *qemu.Options) {
			o.Network, o.MemoryMiB = netip.MustParsePrefix("fd00:5::/64"), 3072
			o.ControlPlanePatches = [][]byte{[]byte(`[{"op": "remove", "path": "/machine/network/interfaces"}]`)}
		})
	n := c.Nodes[0]
	router := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--interface=nodes", "--bind-dynamic", "--pid-file=",
		"--leasefile-ro", "--log-facility=-", "--user=root", "--enable-ra", "--ra-param=nodes,10,600", "--dhcp-range=fd00:5::100,fd00:5::1ff,64,10m",
		fmt.Sprintf("--dhcp-host=%s,[%s]", network.HardwareAddress(c.Name, n.Name), n.Address))
	router.Stdout, router.Stderr = t.Output(), t.Output()
	router.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.Network().Do(router.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = router.Process.Kill()
		_ = router.Wait()
	})
	c.Says(2*time.Minute, 0, "installing Garboard v1.0.0 on the medium GARBOARD")
	m.Reached("the machine installs itself")
	c.Says(2*time.Minute, 0, "slot A is good")
	m.Reached("its system is good")
	c.Ready(m)
	for resource, want := range map[string]string{
		"addresses": n.Address.String(), "leases": "DHCPv6", "routes": "::/0 via fe80:", "slots": "good",
	} {
		c.Eventually(30*time.Second, resource+" have "+want, func() error {
			out, err := c.TryGbctl("-n", n.Address.String(), "get", resource)
			if err == nil && !strings.Contains(out, want) {
				err = errors.New(out)
			}
			return err
		})
	}
	if out := c.Gbctl("-n", n.Address.String(), "get", "networkstatuses", "-o", "yaml"); strings.Contains(out, "10.5.0.") {
		t.Error(out)
	}
	if got := c.Kubectl("get", "node", n.Name, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`); got != n.Address.String() {
		t.Errorf("the node's address is %q, want %s", got, n.Address)
	}
}
