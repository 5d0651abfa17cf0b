//go:build e2e && long

package maintenance

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/vm"
)

// metalBoot is for two machines that boot at the same time on two processors.
const metalBoot = 2 * bootBudget

// The kernel for bare metal drives the network cards and disks of real machines: it boots, is
// configured over the network, and has STATE on its disk. Neither machine has a virtio disk or
// network card, so nothing here works without the drivers.
func TestMetalInQEMU(t *testing.T) {
	machines := []struct {
		vm.Hardware
		disk, bus, state string
		driver           string
	}{
		{vm.Hardware{NIC: "e1000", Disk: vm.NVMe}, "/dev/nvme0n1", "nvme", "/dev/nvme0n1p4", "e1000"},
		{vm.Hardware{NIC: "e1000e", Disk: vm.SATA}, "/dev/sda", "ata", "/dev/sda4", "e1000e"},
	}
	made, metal := e2etest.Metal(t, machines[0].Hardware, machines[1].Hardware)
	for _, path := range []string{made.Kernel, made.Initramfs} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %.1f MB", info.Name(), float64(info.Size())/1e6)
	}

	c, m := e2etest.Start(t, "metal", qemu.QEMU, e2etest.Nodes(2, 0), metal, func(o *qemu.Options) {
		o.Unconfigured, o.MemoryMiB, o.DiskGiB = true, 1536, 4
		// Of type init, the first one would begin a cluster.
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
	})
	for i, is := range machines {
		n := c.Nodes[i]
		var out string
		c.Eventually(metalBoot, n.Name+" answers in maintenance mode", func() (err error) {
			out, err = c.TryGbctl("-n", n.Address.String(), "disks", "--insecure")
			return err
		})
		m.Reached(n.Name + " answers in maintenance mode")
		if !e2etest.Row(out, is.disk, is.bus) || strings.Contains(out, "/dev/vd") {
			t.Errorf("disks of %s:\n%s", n.Name, out)
		}
		c.Gbctl("-n", n.Address.String(), "apply-config", "--insecure", "-f", c.Configuration(n.Name))
	}
	for i, is := range machines {
		n := c.Nodes[i]
		c.Eventually(diskBudget+metalBoot, "STATE of "+n.Name+" is on its disk", func() error {
			out, err := c.TryGbctl("-n", n.Address.String(), "mounts")
			if err == nil && !e2etest.Row(out, "/system/state", is.state) {
				err = fmt.Errorf("file systems:\n%s", out)
			}
			return err
		})
		m.Reached("STATE of " + n.Name + " is on its disk")
		for path, want := range map[string]string{
			"/proc/sys/kernel/osrelease":        made.Release + "\n",
			"/sys/class/net/eth0/device/uevent": "DRIVER=" + is.driver + "\n",
			"/system/state/config.yaml":         "disk: " + is.disk + "\n",
		} {
			// The configuration follows a moment after its file system.
			c.Eventually(diskBudget, fmt.Sprintf("%s of %s has %q", path, n.Name, want), func() error {
				got, err := c.TryGbctl("-n", n.Address.String(), "read", path)
				if err == nil && !strings.Contains(got, want) {
					err = fmt.Errorf("it is:\n%s", got)
				}
				return err
			})
		}
	}
	for _, line := range c.Lines(0) {
		if strings.Contains(line.Text, "apid: Running") || strings.Contains(line.Text, "disks: Running") {
			t.Logf("%s: %6.1fs  %s", c.Node(), line.At.Seconds(), line.Text)
		}
	}
}
