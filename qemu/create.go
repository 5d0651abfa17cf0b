package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu/network"
)

// defaultNetwork is the default of Options.Network.
var defaultNetwork = netip.MustParsePrefix("10.5.0.0/24")

// Check returns the errors of a cluster that Up would bring up, as far as they can be found
// before anything is built: it reads neither Boot nor Images.
func Check(o Options) error {
	d, err := dirOf(o.Name)
	if err != nil {
		return err
	}
	plan, err := readPlan(d)
	if err == nil {
		return o.fits(plan)
	}
	if !errors.Is(err, ErrNoCluster) {
		return err
	}
	if plan, err = newPlan(o, o.Choice); err != nil {
		return err
	}
	_, err = configurations(plan, o, time.Now())
	return err
}

// create plans a new cluster and writes its directory. The plan is written last: without it
// there is no cluster.
func create(ctx context.Context, d clusterDir, o Options) (Plan, error) {
	choice := o.Choice
	if choice.Name == "" {
		var err error
		if choice, err = Choose(ctx, o.Provisioner); err != nil {
			return Plan{}, err
		}
	}
	o.say("%s", choice)
	o.say("validating CIDR and reserving IPs")
	// Two clusters that are created at the same time must not plan the same port.
	release, err := waitHold(ctx, portsByte, func() {})
	if err != nil {
		return Plan{}, err
	}
	defer release()
	plan, err := newPlan(o, choice)
	if err != nil {
		return Plan{}, err
	}
	o.say("generating PKI and tokens")
	files, err := configurations(plan, o, time.Now())
	if err != nil {
		return Plan{}, err
	}
	o.say("creating state directory in %q", string(d))
	// An interrupted creation may have left files.
	if err := os.RemoveAll(string(d)); err != nil {
		return Plan{}, err
	}
	// volumes of a cluster whose directory was removed by hand would be the new nodes' STATE
	if plan.Provisioner == Docker {
		if err := removeFromDocker(ctx, plan, d); err != nil {
			return Plan{}, err
		}
	}
	if err := writeCluster(ctx, d, &plan, o, files); err != nil {
		return Plan{}, errors.Join(err, os.RemoveAll(string(d)))
	}
	return plan, nil
}

func writeCluster(ctx context.Context, d clusterDir, plan *Plan, o Options, files files) error {
	if err := os.Mkdir(string(d), 0o700); err != nil {
		return err
	}
	if err := d.keep(ctx, plan, o); err != nil {
		return err
	}
	for name, data := range files.nodes {
		if err := os.Mkdir(d.node(name), 0o700); err != nil {
			return err
		}
		if err := replace(d.config(name), data, 0o600); err != nil {
			return err
		}
		if o.Prepare == nil {
			continue
		}
		if err := o.Prepare(d.node(name)); err != nil {
			return fmt.Errorf("prepare %s: %w", name, err)
		}
	}
	if err := replace(d.kubeconfig(), files.kubeconfig, 0o600); err != nil {
		return err
	}
	if err := replace(d.clientConfig(), files.clientConfig, 0o600); err != nil {
		return err
	}
	return writePlan(d, *plan)
}

func newPlan(o Options, choice Choice) (Plan, error) {
	prefix := cmp.Or(o.Network, defaultNetwork)
	addresses, err := o.addresses(prefix)
	var second []netip.Addr
	if err == nil && o.Second.IsValid() {
		second, err = o.addresses(o.Second)
	}
	if err == nil {
		err = o.check(choice)
	}
	if err != nil {
		return Plan{}, err
	}
	mirrors, err := network.NewMirrors(o.Mirrors)
	if err != nil {
		return Plan{}, err
	}
	ports, err := freePorts(o.Name, 1+o.nodes())
	if err != nil {
		return Plan{}, err
	}
	p := Plan{
		Name: o.Name, Provisioner: choice.Name, Accelerator: choice.Accelerator,
		Network: prefix, Second: o.Second, Mirrors: mirrors, Internet: o.Internet, Kubernetes: o.Kubernetes, SelfHosted: o.SelfHosted, Unplugged: o.Unplugged,
		Unconfigured: o.Unconfigured, Self: o.self(), KubernetesPort: ports[0],
	}
	if o.SharedAddress {
		if p.Shared = last(prefix); slices.Contains(addresses, p.Shared) {
			return Plan{}, fmt.Errorf("network %s has no room for %s and an address that they share", prefix, counted(o.controlPlanes(), o.Workers))
		}
		if p.Second.IsValid() {
			p.SecondShared = last(p.Second)
		}
	}
	for i, address := range addresses {
		role, number, kind := "controlplane", i+1, "controlplane"
		switch {
		case i == 0:
			kind = "init"
		case i >= o.controlPlanes():
			role, number, kind = "worker", i-o.controlPlanes()+1, "worker"
		}
		n := Node{
			Name: fmt.Sprintf("%s-%s-%d", o.Name, role, number), Type: kind, Address: address, APIPort: ports[i+1],
			Later: i < o.controlPlanes() && i >= o.controlPlanes()-o.Later,
			CPUs:  o.CPUs, MemoryMiB: o.MemoryMiB,
		}
		if second != nil {
			n.Second = second[i]
		}
		if choice.Name == QEMU {
			n.ClockOffset = o.ClockOffset
			n.CPUs, n.MemoryMiB, n.DiskGiB = cmp.Or(o.CPUs, defaultCPUs), cmp.Or(o.MemoryMiB, defaultMemoryMiB), cmp.Or(o.DiskGiB, defaultDiskGiB)
			n.Disks = o.Disks
			if i < len(o.Hardware) {
				n.Hardware = o.Hardware[i]
			}
			n.Hardware.Medium = cmp.Or(n.Hardware.Medium, o.Boot.medium())
		}
		p.Nodes = append(p.Nodes, n)
	}
	return p, nil
}

// check returns errors of the options before anything is made.
func (o Options) check(choice Choice) error {
	first := cmp.Or(o.Network, defaultNetwork).Addr()
	version := "v" + strings.TrimPrefix(cmp.Or(o.KubernetesVersion, config.KubernetesVersion), "v")
	switch {
	case version != config.KubernetesVersion && !slices.Contains(o.Kubernetes, version) && len(o.Mirrors) == 0:
		return fmt.Errorf("version %s of Kubernetes can't be built here: name a registry that has it as a mirror (--registry-mirror '*'=URL), or choose one of %s",
			version, strings.Join(components.KubernetesVersions(), ", "))
	case o.ClockOffset != 0 && choice.Name != QEMU:
		return errSharedClock
	case o.Second.IsValid() && o.Second.Addr().Is4() == first.Is4():
		return fmt.Errorf("networks %s and %s: must be one of IPv4 and one of IPv6", cmp.Or(o.Network, defaultNetwork), o.Second)
	case choice.Name == Docker && (first.Is6() || o.Second.IsValid()):
		return errors.New("nodes in Docker have addresses of IPv4 only: choose another provisioner for IPv6")
	case o.Internet && (choice.Name == Docker || first.Is6()):
		return errors.New("a way to the internet is for nodes in containers or QEMU, in a network of IPv4")
	case o.Unconfigured && first.Is6():
		return errors.New("nodes without a configuration have addresses from DHCP, which is here for IPv4 only")
	case o.CPUs < 0 || o.MemoryMiB < 0:
		return errors.New("a node's processors and memory can't be negative")
	case o.Disks < 0 || o.Disks > maxDisks:
		return fmt.Errorf("a node can have 1 to %d disks, not %d", maxDisks, o.Disks)
	case !o.WireGuard.IsValid():
		return nil
	case !o.WireGuard.Addr().Is4() || o.WireGuard != o.WireGuard.Masked() || o.WireGuard.Bits() > 30 || 1<<(32-o.WireGuard.Bits())-2 < o.nodes():
		return fmt.Errorf("WireGuard's network %s: must be an IPv4 network such as 10.1.0.0/24, with room for %s", o.WireGuard, counted(o.controlPlanes(), o.Workers))
	case o.WireGuard.Overlaps(cmp.Or(o.Network, defaultNetwork)):
		return fmt.Errorf("WireGuard's network %s has addresses of the nodes' network %s", o.WireGuard, cmp.Or(o.Network, defaultNetwork))
	}
	return nil
}

func (o Options) controlPlanes() int { return cmp.Or(o.ControlPlanes, 1) }

func (o Options) nodes() int { return o.controlPlanes() + o.Workers }

// addresses returns those of the nodes in a network, control planes first, from the second
// address of the network on. The first is this machine's.
func (o Options) addresses(prefix netip.Prefix) ([]netip.Addr, error) {
	if o.ControlPlanes < 0 || o.Workers < 0 {
		return nil, fmt.Errorf("a cluster of %s can't be", counted(o.ControlPlanes, o.Workers))
	}
	if o.Later < 0 || o.Later >= o.controlPlanes() {
		return nil, fmt.Errorf("of %d control planes %d can't be turned on later: one must start the cluster", o.controlPlanes(), o.Later)
	}
	if prefix != prefix.Masked() {
		return nil, fmt.Errorf("network %s: must be a network, such as %s", prefix, prefix.Masked())
	}
	var all []netip.Addr
	for next := network.Gateway(prefix).Next(); len(all) < o.nodes(); next = next.Next() {
		// The last address of a network is the broadcast address (RFC 919).
		if !prefix.Contains(next.Next()) {
			return nil, fmt.Errorf("network %s has no room for %s", prefix, counted(o.controlPlanes(), o.Workers))
		}
		all = append(all, next)
	}
	return all, nil
}

// last returns the highest address of a network that a node may have.
func last(network netip.Prefix) netip.Addr {
	bytes := network.Masked().Addr().AsSlice()
	for bit := network.Bits(); bit < network.Addr().BitLen(); bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	highest, _ := netip.AddrFromSlice(bytes)
	return highest.Prev()
}

// counted returns the numbers of nodes in words.
func counted(controlPlanes, workers int) string {
	plural := func(n int, what string) string {
		if n == 1 {
			return "1 " + what
		}
		return fmt.Sprintf("%d %ss", n, what)
	}
	return plural(controlPlanes, "control plane") + " and " + plural(workers, "worker")
}
