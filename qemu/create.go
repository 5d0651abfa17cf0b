package qemu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// containerNetwork is where container nodes are unless asked otherwise (S-333).
var containerNetwork = netip.MustParsePrefix("10.5.0.0/24")

// create plans a new cluster and writes its directory, the plan last: without it
// there is no cluster.
func create(ctx context.Context, d clusterDir, o Options) (Plan, error) {
	choice := o.Choice
	if choice.Name == "" {
		var err error
		if choice, err = Choose(ctx, o.Provisioner, o.nodes()); err != nil {
			return Plan{}, err
		}
	}
	o.say("%s", choice)
	o.say("validating CIDR and reserving IPs")
	if err := os.MkdirAll(filepath.Dir(string(d)), 0o700); err != nil {
		return Plan{}, err
	}
	// Two that are created at the same time must not plan the same port.
	release, err := waitHold(filepath.Join(filepath.Dir(string(d)), ".lock"))
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
	// What an interrupted creation left is nobody's.
	if err := os.RemoveAll(string(d)); err != nil {
		return Plan{}, err
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
	if choice.Name == QEMU && o.nodes() > 1 {
		return Plan{}, errors.New("nodes in QEMU are each on a network of their own: several nodes need the provisioner container")
	}
	if choice.Name == Container && len(o.Mirrors) > 0 {
		return Plan{}, errors.New("nodes that are containers reach no registry but the one with the images that were built: mirrors need the provisioner qemu")
	}
	if choice.Name == QEMU && o.SharedAddress {
		return Plan{}, errors.New("nodes in QEMU are each on a network of their own: a shared address needs the provisioner container")
	}
	addresses, network, err := o.addresses(choice.Name)
	if err != nil {
		return Plan{}, err
	}
	ports, err := freePorts(o.Name, 1+o.nodes())
	if err != nil {
		return Plan{}, err
	}
	p := Plan{
		Name: o.Name, Provisioner: choice.Name, Accelerator: choice.Accelerator,
		Network: network, Isolated: o.Isolated, Unplugged: o.Unplugged,
		Unconfigured: o.Unconfigured, Self: o.self(), KubernetesPort: ports[0],
	}
	if o.SharedAddress {
		if p.Shared = last(network); slices.Contains(addresses, p.Shared) {
			return Plan{}, fmt.Errorf("network %s has no room for %s and an address that they share", network, counted(o.controlPlanes(), o.Workers))
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
		p.Nodes = append(p.Nodes, Node{
			Name: fmt.Sprintf("%s-%s-%d", o.Name, role, number), Type: kind, Address: address, APIPort: ports[i+1],
			CPUs: or(o.CPUs, defaultCPUs), MemoryMiB: or(o.MemoryMiB, defaultMemoryMiB), DiskGiB: or(o.DiskGiB, defaultDiskGiB),
		})
	}
	return p, nil
}

func (o Options) controlPlanes() int { return or(o.ControlPlanes, 1) }

func (o Options) nodes() int { return o.controlPlanes() + o.Workers }

// addresses are those of the nodes, control planes first, from the second address of
// the network on: the first is this machine's.
func (o Options) addresses(provisioner string) ([]netip.Addr, netip.Prefix, error) {
	if o.ControlPlanes < 0 || o.Workers < 0 {
		return nil, netip.Prefix{}, fmt.Errorf("a cluster of %s can't be", counted(o.ControlPlanes, o.Workers))
	}
	if provisioner == QEMU {
		return []netip.Addr{slirpGuest}, slirpNetwork, nil
	}
	network := o.Network
	if !network.IsValid() {
		network = containerNetwork
	}
	if !network.Addr().Is4() || network != network.Masked() {
		return nil, network, fmt.Errorf("network %s: must be an IPv4 network, such as %s", network, containerNetwork)
	}
	var all []netip.Addr
	for next := gateway(network).Next(); len(all) < o.nodes(); next = next.Next() {
		// The last address of a network is for all (RFC 919).
		if !network.Contains(next.Next()) {
			return nil, network, fmt.Errorf("network %s has no room for %s", network, counted(o.controlPlanes(), o.Workers))
		}
		all = append(all, next)
	}
	return all, network, nil
}

// last is the highest address of an IPv4 network that a node may have.
func last(network netip.Prefix) netip.Addr {
	bytes := network.Masked().Addr().As4()
	hosts := uint32(1)<<(32-network.Bits()) - 1
	binary.BigEndian.PutUint32(bytes[:], binary.BigEndian.Uint32(bytes[:])|hosts)
	return netip.AddrFrom4(bytes).Prev()
}

// counted is how many nodes there are, in words.
func counted(controlPlanes, workers int) string {
	plural := func(n int, what string) string {
		if n == 1 {
			return "1 " + what
		}
		return fmt.Sprintf("%d %ss", n, what)
	}
	return plural(controlPlanes, "control plane") + " and " + plural(workers, "worker")
}

func or(value, otherwise int) int {
	if value == 0 {
		return otherwise
	}
	return value
}
