//go:build e2e

package e2etest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/network/wire"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	bridgeName = "nodes" // of package network
	// politeness is the niceness of an emulated machine: the containers of its cluster come first.
	politeness = 5
	memoryMiB  = 3072
)

// Machine turns on a virtual machine in the place of a container that is off. It has the container's address, and its
// configuration with patches; its disk and memory are those of an option like DiskImage, whose Hardware has the devices
// at each start (the last ones from then on). It starts again after each restart, until the test ends. The cluster that
// is returned has this node alone, and budgets for its speed.
func (c *Cluster) Machine(n qemu.Node, disk Option, patches ...string) *Cluster {
	c.t.Helper()
	choice, err := qemu.Choose(c.t.Context(), qemu.QEMU)
	if err != nil {
		c.t.Fatal(err)
	}
	text, err := os.ReadFile(c.Configuration(n.Name))
	for _, p := range patches {
		if err == nil {
			text, err = patch.Apply(text, []byte(p))
		}
	}
	dir := c.t.TempDir()
	configuration := filepath.Join(dir, "config.yaml")
	if err == nil {
		err = os.WriteFile(configuration, text, 0o600)
	}
	if err != nil {
		c.t.Fatalf("configuration of %s: %v", n.Name, err)
	}
	boots := qemu.Options{MemoryMiB: memoryMiB}
	disk(&boots)
	hardware := boots.Hardware
	if len(hardware) == 0 {
		hardware = []vm.Hardware{{}}
	}
	for i := range hardware {
		hardware[i].Medium = vm.OwnDisk
	}
	c.supervise(fmt.Sprintf("tap%d", n.Address.As4()[3]), vm.Config{
		Name: c.Name + "/" + n.Name, Accelerator: choice.Accelerator, CPUs: 2, MemoryMiB: boots.MemoryMiB,
		Console: c.Console(n.Name), Chart: filepath.Join(dir, "chart"), Configuration: configuration,
		Disk: filepath.Join(dir, "disk.img"), DiskImage: boots.Boot.Disk, DiskGiB: boots.DiskGiB,
		HardwareAddr: network.HardwareAddress(c.Name, n.Name),
	}, hardware)
	plan := *c.Cluster
	plan.Accelerator, plan.Nodes = choice.Accelerator, []qemu.Node{n}
	alone := *c
	alone.Cluster = &plan
	return &alone
}

// supervise starts a machine at a tap, and again whenever it has ended.
func (c *Cluster) supervise(tap string, machine vm.Config, hardware []vm.Hardware) {
	c.t.Helper()
	thread := c.Network()
	start := func() (running *vm.Running, err error) {
		machine.Hardware, hardware = hardware[0], hardware[min(1, len(hardware)-1):]
		var cable *os.File
		err = thread.Do(func() (err error) {
			if err = unix.Setpriority(unix.PRIO_PROCESS, 0, politeness); err == nil {
				cable, err = plug(tap)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		defer cable.Close()
		return vm.Start(context.Background(), thread, machine, cable)
	}
	running, err := start()
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for err == nil {
			stop := context.AfterFunc(ctx, running.Cut)
			reason, _ := running.Wait()
			stop()
			if ctx.Err() != nil || reason != exit.Reboot && reason != exit.Died {
				return
			}
			running, err = start()
		}
		c.t.Error(err)
	})
	c.t.Cleanup(func() {
		cancel()
		done.Wait()
	})
}

// plug makes a tap at the bridge of the nodes, in whose network the calling thread is.
func plug(tap string) (*os.File, error) {
	cable, err := wire.OpenTap(tap)
	if err != nil {
		return nil, err
	}
	link, err := netlink.LinkByName(tap)
	if err == nil {
		var bridge netlink.Link
		if bridge, err = netlink.LinkByName(bridgeName); err == nil {
			err = netlink.LinkSetMaster(link, bridge)
		}
	}
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		cable.Close()
	}
	return cable, err
}
