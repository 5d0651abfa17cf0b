//go:build story && long

// Package machines is the story of a cluster of several virtual machines: real kernels
// and disks, on one network, with addresses from DHCP.
package machines

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
)

func TestMain(m *testing.M) { story.Main(m) }

// S-330, S-333.
func TestSeveralMachines(t *testing.T) {
	story.Built(t, qemu.QEMU)
	m := story.Marks(t)
	c := story.New(t, "machines", qemu.QEMU, func(o *qemu.Options) { o.ControlPlanes, o.Workers, o.MemoryMiB = 2, 1, 2048 })
	m.Reached("power is on")
	c.Ready(m)
	t.Log(c.Kubectl("get", "nodes", "-o", "wide"))
}
