package qemu

import (
	"context"
	"fmt"

	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/vm"
)

// machines runs nodes as virtual machines.
type machines struct {
	plan Plan
	dir  clusterDir
	lan  *network.LAN
}

func (m machines) config(n Node) vm.Config {
	c := vm.Config{
		Name:         m.plan.Name + "/" + n.Name,
		Mainboard:    m.dir.mainboard(n.Name),
		Accelerator:  m.plan.Accelerator,
		CPUs:         n.CPUs,
		MemoryMiB:    n.MemoryMiB,
		Kernel:       m.plan.Boot.Kernel,
		Initramfs:    m.plan.Boot.Initramfs,
		Cmdline:      m.plan.Boot.Cmdline,
		Medium:       m.plan.Boot.Medium,
		Console:      m.dir.console(n.Name),
		Chart:        m.dir.chart(n.Name),
		Disk:         m.dir.disk(n.Name),
		DiskImage:    m.plan.Boot.Disk,
		DiskGiB:      n.DiskGiB,
		Disks:        n.Disks,
		Hardware:     n.Hardware,
		HardwareAddr: network.HardwareAddress(m.plan.Name, n.Name),
		Unplugged:    m.plan.Unplugged,
		ClockOffset:  n.ClockOffset,
	}
	if m.plan.Boot.UEFI {
		c.Variables = m.dir.variables(n.Name)
	}
	if !m.plan.Unconfigured {
		c.Configuration = m.dir.config(n.Name)
	}
	return c
}

func (m machines) Start(ctx context.Context, n Node) (running, error) {
	cable, err := m.lan.Tap(n.onLAN())
	if err != nil {
		return nil, err
	}
	defer cable.Close() // QEMU has a descriptor of its own
	r, err := vm.Start(ctx, m.lan.Thread(), m.config(n), cable)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", n.Name, err)
	}
	return r, nil
}

// Close has nothing to do: machines share only their network.
func (m machines) Close() error { return nil }
