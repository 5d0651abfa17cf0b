//go:build e2e && long

package machines

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
)

// A network without IPv4, whose router (radvd) says that DHCPv6 (Kea) has the addresses. A machine whose configuration
// has no network boots a medium there, installs itself, starts from its disk, and is a Ready node.
func TestIPv6OnlyInQEMU(t *testing.T) {
	c, m := e2etest.Start(t, "six-qemu", qemu.QEMU, e2etest.Nodes(1, 0), e2etest.Medium(t, media.Options{Args: e2etest.SerialArgs(), Version: "v1.0.0"}),
		func(o *qemu.Options) {
			o.Network, o.MemoryMiB = netip.MustParsePrefix("fd00:5::/64"), 3072
			o.ControlPlanePatches = [][]byte{[]byte(`[{"op": "remove", "path": "/machine/network/interfaces"}]`)}
		})
	n := c.Nodes[0]
	runs := func(program, config string, args ...string) {
		file := filepath.Join(t.TempDir(), "config")
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(program, append(args, file)...)
		cmd.Env = append(os.Environ(), "KEA_PIDFILE_DIR="+t.TempDir(), "KEA_LOCKFILE_DIR=none")
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := c.Network().Do(cmd.Start); err != nil {
			t.Fatalf("%s (dev setup installs it): %v", program, err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
	// A node's identifier is made from its MAC address (RFC 8415 §11.4).
	runs("kea-dhcp6", fmt.Sprintf(`{"Dhcp6": {
		"interfaces-config": {"interfaces": ["nodes"], "service-sockets-max-retries": 50, "service-sockets-retry-wait-time": 200},
		"server-id": {"type": "EN", "enterprise-id": 32473, "identifier": "010203", "persist": false},
		"lease-database": {"type": "memfile", "persist": false},
		"preferred-lifetime": 500, "valid-lifetime": 600, "loggers": [{"name": "kea-dhcp6", "severity": "INFO", "output_options": [{"output": "stderr"}]}],
		"subnet6": [{"subnet": "fd00:5::/64", "interface": "nodes", "pools": [{"pool": "fd00:5::100 - fd00:5::1ff"}],
			"reservations": [{"duid": "00:03:00:01:%s", "ip-addresses": [%q]}]}]}}`, network.HardwareAddress(c.Name, n.Name), n.Address), "-c")
	runs("radvd", `interface nodes {
		AdvSendAdvert on; AdvManagedFlag on; MinRtrAdvInterval 3; MaxRtrAdvInterval 10; AdvDefaultLifetime 600;
		prefix fd00:5::/64 { AdvOnLink on; AdvAutonomous off; };
	};`, "--nodaemon", "--logmethod=stderr", "--pidfile="+filepath.Join(t.TempDir(), "pid"), "--config")
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
