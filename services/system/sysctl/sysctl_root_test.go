package sysctl

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/isolate"
)

// TestMain runs the tests, as root, once more in a network namespace of their
// own: its parameters are the ones that may be changed.
func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }

// The kernel itself: values that it rounds, refuses, doesn't know, and gives back.
func TestKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	const table = "/proc/sys/net/ipv4/"
	value := func(name string) string {
		data, err := os.ReadFile(table + name)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(data))
	}
	ttl, ports := value("ip_default_ttl"), value("ip_local_port_range")
	const ours = "50000-50001"
	if err := os.WriteFile(table+"ip_local_reserved_ports", []byte(ours), 0); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, store: resource.NewStore(), dir: "/proc/sys"}
		b.run(boot.Machine)
		b.configure(map[string]string{
			"net.ipv4.ip_default_ttl":      "77",
			"net.ipv4.ip_local_port_range": "20000 30000",
			"net.ipv4.tcp_syncookies":      "many",
			"net.ipv4.no_such_thing":       "1",
			// The node's own stay reserved.
			"net.ipv4.ip_local_reserved_ports": "8080,50001-50003",
		})
		if got := value("ip_default_ttl"); got != "77" {
			t.Errorf("ttl is %s", got)
		}
		syncookies := value("tcp_syncookies")
		b.statuses(map[string]Status{
			"net.ipv4.ip_default_ttl":          {Value: "77", Default: ttl},
			"net.ipv4.ip_local_port_range":     {Value: "20000\t30000", Default: ports},
			"net.ipv4.tcp_syncookies":          {Value: syncookies, Default: syncookies, Problem: `the kernel refuses the value "many": invalid argument`},
			"net.ipv4.ip_local_reserved_ports": {Value: "8080,50000-50003", Default: ours},
			"net.ipv4.no_such_thing":           {Problem: "there is no such parameter; it is set as soon as a module, a device or a link brings it"},
		})
		b.configure(map[string]string{"net.ipv4.ip_local_reserved_ports": ""})
		if got := value("ip_local_reserved_ports"); got != ours {
			t.Errorf("%s are reserved, and nothing was configured", got)
		}
		b.configure(nil)
		if got := value("ip_local_reserved_ports"); got != ours {
			t.Errorf("%s are reserved, and were %s", got, ours)
		}
		if got := value("ip_default_ttl"); got != ttl {
			t.Errorf("ttl is %s, and was %s", got, ttl)
		}
		if got := value("ip_local_port_range"); got != ports {
			t.Errorf("ports are %s, and were %s", got, ports)
		}
	})
}
