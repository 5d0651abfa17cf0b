//go:build e2e

// Package maintenance tests a machine without a configuration: it gets one over the network
// and becomes a node.
package maintenance

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	bootBudget = 15 * time.Second // as on real hardware
	diskBudget = 20 * time.Second // for an empty disk to be taken
)

// fingerprint matches the machine's certificate on the console.
var fingerprint = regexp.MustCompile(`[0-9A-F]{2}(:[0-9A-F]{2}){31}`)

// S-015, S-184.
func TestMaintenanceInQEMU(t *testing.T) {
	c, m := e2etest.Start(t, "maintenance", qemu.QEMU, func(o *qemu.Options) { o.Unconfigured = true })
	line := c.Says(bootBudget, 0, "maintenance mode", "SHA-256")
	m.Reached("maintenance mode")
	print := fingerprint.FindString(line.Text)
	if print == "" {
		t.Fatalf("no fingerprint on the console: %s", line.Text)
	}

	// Without --insecure, or with the fingerprint of another machine, all requests fail.
	node, file := c.Nodes[0].Address.String(), c.Configuration(c.Node())
	if _, err := c.TryGbctl("apply-config", "-n", node, "-f", file); err == nil || !strings.Contains(err.Error(), "--insecure") {
		t.Errorf("applied without --insecure: %v", err)
	}
	other := strings.Repeat("00:", 31) + "00"
	if _, err := c.TryGbctl("apply-config", "--insecure", "--fingerprint", other, "-n", node, "-f", file); err == nil || !strings.Contains(strings.ToLower(err.Error()), "fingerprint") {
		t.Errorf("applied to a machine with another fingerprint: %v", err)
	}
	// Requests that maintenance mode doesn't allow are refused.
	if _, err := c.TryGbctl("services", "--insecure", "--fingerprint", print, "-n", node); err == nil {
		t.Error("a machine without a configuration lists its services")
	}
	if out := c.Gbctl("disks", "--insecure", "--fingerprint", print, "-n", node); !strings.Contains(out, "/dev/vda") {
		t.Errorf("disks:\n%s", out)
	}
	m.Reached("other requests were refused")

	c.Gbctl("apply-config", "--insecure", "--fingerprint", print, "-n", node, "-f", file)
	m.Reached("the configuration is applied")
	c.Says(diskBudget, 0, "disks: Running (up)")
	c.Eventually(bootBudget, "the machine API knows its users", func() error {
		_, err := c.TryGbctl("version")
		return err
	})
	m.Reached("the machine API knows its users")
	if _, err := c.TryGbctl("apply-config", "--insecure", "--fingerprint", print, "-n", node, "-f", file); err == nil {
		t.Error("anybody may configure a node that has a configuration")
	}

	for group, want := range map[string]string{"init": "40\n", "system": "80\n"} { // two processors
		if got := c.Gbctl("read", "/sys/fs/cgroup/"+group+"/cpu.weight"); got != want {
			t.Errorf("the weight of %s is %q instead of %q", group, got, want)
		}
	}

	// The configuration is stored: the next boot needs no request.
	said := len(c.Text())
	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	c.Says(bootBudget+diskBudget, said, "machined", "configuration from state")
	m.Reached("booted from its own configuration")
}
