package qemu

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu/network"
)

const kubernetesPort = 6443

// files are the first files of a new cluster.
type files struct {
	nodes        map[string][]byte // their machine configurations
	kubeconfig   []byte
	clientConfig []byte
}

// configurations makes the machine configuration of each node, from one set of new secrets,
// and the files for gbctl and kubectl.
func configurations(p Plan, o Options, now time.Time) (f files, err error) {
	secrets, err := config.NewSecrets(now)
	if err != nil {
		return f, err
	}
	var vpn *wireguard
	if o.WireGuard.IsValid() {
		if vpn, err = newWireGuard(p, o.WireGuard); err != nil {
			return f, err
		}
	}
	f.nodes = map[string][]byte{}
	for i, n := range p.Nodes {
		var more []config.Interface
		if vpn != nil {
			more = append(more, vpn.link(i))
		}
		if f.nodes[n.Name], err = nodeConfiguration(p, n, o, secrets, now, more...); err != nil {
			return f, fmt.Errorf("configuration of %s: %w", n.Name, err)
		}
	}
	server := fmt.Sprintf("https://127.0.0.1:%d", p.KubernetesPort)
	if f.kubeconfig, _, err = config.AdminKubeconfig(p.Name, server, secrets.KubernetesCA.CA(), secrets.KubernetesCA.Crt, now); err != nil {
		return f, err
	}
	f.clientConfig, err = clientConfig(p, secrets.MachineCA.CA(), now)
	return f, err
}

// clientConfig is the file for gbctl on this machine, which connects to each node through a
// port of the loopback, by the node's name or address.
func clientConfig(p Plan, ca pki.CA, now time.Time) ([]byte, error) {
	cert, key, err := ca.Issue(pki.Leaf{CN: "admin", Orgs: []string{string(api.Admin)}, Client: true, Validity: adminValidity, Now: now})
	if err != nil {
		return nil, err
	}
	b64 := base64.StdEncoding.EncodeToString
	context := &client.Context{CA: b64(ca.Cert), Crt: b64(cert), Key: b64(key), Via: map[string]string{}}
	for _, n := range p.Nodes {
		context.Nodes = append(context.Nodes, n.Address.String())
		for _, name := range []string{n.Address.String(), n.Name} {
			context.Via[name] = fmt.Sprintf("127.0.0.1:%d", n.APIPort)
		}
	}
	context.Via[p.endpoint().String()] = fmt.Sprintf("127.0.0.1:%d", p.KubernetesPort) // for gbctl kubeconfig
	for _, n := range p.controlPlanes() {
		context.Endpoints = append(context.Endpoints, n.Address.String())
	}
	c := client.Config{Context: p.Name, Contexts: map[string]*client.Context{p.Name: context}}
	return c.Encode()
}

// nodeConfiguration is the configuration of one node, with interfaces in addition to the
// one that every node has.
func nodeConfiguration(p Plan, n Node, o Options, secrets *config.Secrets, now time.Time, more ...config.Interface) ([]byte, error) {
	g := config.Options{
		ClusterName: p.Name,
		Endpoint:    "https://" + p.endpoint().String(),
		Type:        config.MachineType(n.Type),
		Hostname:    n.Name,
		Mirrors:     p.mirrors(),
		// Users connect through a port of this machine's loopback.
		CertSANs: []string{"127.0.0.1", "localhost"},
		// There must be a node on which pods can run.
		AllowScheduling:   len(p.controlPlanes()) == len(p.Nodes),
		KubernetesVersion: o.KubernetesVersion,
		Secrets:           secrets,
		Now:               now,
	}
	if p.Provisioner == QEMU {
		g.InstallDisk = n.Hardware.DiskPath()
	}
	c, err := config.Generate(g)
	if err != nil {
		return nil, err
	}
	// A container has this machine's clock, and one in QEMU starts from it. Nodes can't
	// connect to a time server.
	c.Machine.Time.Disabled = true
	if p.Accelerator == "tcg" && n.Type != string(config.Worker) {
		emulated(&c.Cluster, len(p.controlPlanes()))
	}
	c.Machine.Install.Image = o.InstallImage
	if p.Internet {
		c.Machine.Network.Nameservers = []netip.Addr{network.NameServer}
	}
	c.Machine.Network.Interfaces = p.interfaces(n, more)
	c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets = p.subnets()
	text, err := c.Encode()
	if err != nil {
		return nil, err
	}
	if text, err = o.patched(n, text); err != nil {
		return nil, err
	}
	load := config.LoadForContainer
	if p.Provisioner == QEMU {
		load = config.Load
	}
	made, _, err := load(n.Name, text)
	if err != nil {
		return text, err
	}
	return text, config.CheckManifests(n.Name, text, made, nil)
}

// interfaces returns those of a node: a container has its addresses from its configuration. A
// machine has that of IPv4 from DHCP, which is the default.
func (p Plan) interfaces(n Node, more []config.Interface) (all []config.Interface) {
	for _, own := range []struct {
		address, router, shared netip.Addr
		network                 netip.Prefix
	}{{n.Address, p.router(), p.Shared, p.Network}, {n.Second, network.Gateway(p.Second), p.SecondShared, p.Second}} {
		if !own.address.IsValid() {
			continue
		}
		in := config.Interface{Name: "eth0"}
		if in.DHCP = p.Provisioner == QEMU && own.address.Is4(); !in.DHCP {
			in.CIDR = netip.PrefixFrom(own.address, own.network.Bits())
			// It may be connected to nothing, but Kubernetes gets its address from the default
			// route.
			in.Routes = []config.Route{{Network: netip.PrefixFrom(own.network.Masked().Addr(), 0).Masked(), Gateway: own.router}}
		}
		if own.shared.IsValid() && n.Type != string(config.Worker) {
			in.VIP = &config.VIP{IP: own.shared}
		}
		all = append(all, in)
	}
	if all = append(all, more...); len(all) == 1 && all[0].DHCP && all[0].VIP == nil {
		return nil
	}
	return all
}

// mirrors are the registry mirrors in a node's configuration, by host. The last one of every
// host is the registry with the images that were built: a host with an entry of its own
// doesn't use that of "*".
func (p Plan) mirrors() map[string][]string {
	all := map[string][]string{"*": nil}
	for _, m := range p.Mirrors {
		all[m.Host] = append(all[m.Host], "http://"+m.Address(p.Network).String())
	}
	for host := range all {
		all[host] = append(all[host], "http://"+network.RegistryAddress(p.Network).String())
	}
	return all
}

// patched applies the patches that are for a node.
func (o Options) patched(n Node, text []byte) (_ []byte, err error) {
	own := o.ControlPlanePatches
	if n.Type == string(config.Worker) {
		own = o.WorkerPatches
	}
	for _, p := range slices.Concat(o.Patches, own) {
		if text, err = patch.Apply(text, p); err != nil {
			return nil, err
		}
	}
	return text, nil
}

// emulated sets longer timeouts for the control planes of an emulated cluster. They are ten
// times slower than real ones. A leader misses the 10 s in which it must renew its lease,
// ends, and starts again; and after a power cut the next one waits for the end of the old
// lease. So a single control plane works without leader election, and several have leases
// ten times as long. Members of etcd send heartbeats ten times as seldom (default: 100 ms
// and 1 s).
func emulated(c *config.Cluster, controlPlanes int) {
	leader := config.Args{"leader-elect": {"false"}}
	if controlPlanes > 1 {
		leader = config.Args{"leader-elect-lease-duration": {"150s"}, "leader-elect-renew-deadline": {"100s"}, "leader-elect-retry-period": {"20s"}}
		c.Etcd.ExtraArgs = config.Args{"heartbeat-interval": {"1000"}, "election-timeout": {"10000"}}
	}
	c.ControllerManager.ExtraArgs, c.Scheduler.ExtraArgs = leader, leader
}

// adminValidity is how long the client certificate of a development cluster is valid.
const adminValidity = 365 * 24 * time.Hour
