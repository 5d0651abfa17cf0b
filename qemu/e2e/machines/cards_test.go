//go:build e2e && long

package machines

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/vm"
)

// A machine gets a second card, before its own one in the order in which the kernel finds them: the kernel gives the
// name of the own card to the second one. The entry for the own card names it by its MAC address, so that node, address
// and name stay.
func TestCardsChangeNames(t *testing.T) {
	disk := e2etest.DiskImage(t, media.Options{Args: e2etest.SerialArgs(), Version: "v1.0.0"})
	all, m := e2etest.Ready(t, "cards", qemu.Container, e2etest.Nodes(1, 1))
	worker := all.Nodes[1]
	if err := all.Cut(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	all.Kubectl("delete", "node", worker.Name) // the machine has other keys: the name is free for it now
	mac := network.HardwareAddress(all.Name, worker.Name).String()
	c := all.Machine(worker, func(o *qemu.Options) {
		disk(o)
		o.MemoryMiB, o.Hardware = 1024, []vm.Hardware{{}, {Silent: vm.Before}}
	}, "machine: {install: {disk: /dev/vda}}", fmt.Sprintf(`[{"op": "replace", "path": "/machine/network/interfaces", "value": [
		{"interface": "lan0", "hardwareAddr": %q, "cidr": "%s/24", "routes": [{"network": "0.0.0.0/0", "gateway": "10.5.0.1"}]}]}]`, mac, worker.Address))
	t.Attr(e2etest.Booted, qemu.QEMU)
	has := func(kernelName string) {
		t.Helper()
		c.Eventually(2*time.Minute, "lan0 is "+kernelName, func() error {
			out, err := c.TryGbctl("-n", worker.Name, "get", "links")
			if err == nil && !regexp.MustCompile(`(?m)`+kernelName+` .*lan0`).MatchString(out) {
				err = errors.New(out)
			}
			return err
		})
		c.Eventually(3*time.Minute, "the node is Ready", func() error { return all.NodesReady(all.Nodes...) })
		nodes := strings.Fields(all.Kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
		if len(nodes) != len(all.Nodes) {
			t.Errorf("nodes are %q", nodes)
		}
		m.Reached("lan0 is " + kernelName)
	}
	has("eth0")
	if out, err := c.Patient(3*time.Minute).TryGbctl("-n", worker.Name, "reboot"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	has("eth1")
}
