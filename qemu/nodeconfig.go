package qemu

import (
	"encoding/base64"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/config/pki"
)

const (
	kubernetesPort = 6443
	registryPort   = 5000
	qemuDisk       = "/dev/vda"
)

// Addresses in QEMU's user network (QEMU's documentation, "Using the user mode
// network stack"): it gives the guest the first, and we put the registry on the
// second, which is nobody's.
var (
	slirpGuest    = netip.MustParseAddr("10.0.2.15")
	slirpRegistry = netip.MustParseAddr("10.0.2.100")
	slirpNetwork  = netip.MustParsePrefix("10.0.2.0/24")
)

// gateway is the address of the host process in a network: the first.
func gateway(network netip.Prefix) netip.Addr { return network.Masked().Addr().Next() }

// registryAddress is where nodes find the images.
func (p Plan) registryAddress() netip.AddrPort {
	if p.Provisioner == QEMU {
		return netip.AddrPortFrom(slirpRegistry, registryPort)
	}
	return netip.AddrPortFrom(gateway(p.Network), registryPort)
}

// files are what a new cluster begins with.
type files struct {
	nodes        map[string][]byte // their machine configurations
	kubeconfig   []byte
	clientConfig []byte
}

// configurations makes the machine configuration of each node, from one set of
// fresh secrets, and what the administrator's programs need.
func configurations(p Plan, o Options, now time.Time) (f files, err error) {
	secrets, err := config.NewSecrets(now)
	if err != nil {
		return f, err
	}
	f.nodes = map[string][]byte{}
	for _, n := range p.Nodes {
		if f.nodes[n.Name], err = nodeConfiguration(p, n, o, secrets, now); err != nil {
			return f, fmt.Errorf("configuration of %s: %w", n.Name, err)
		}
	}
	server := fmt.Sprintf("https://127.0.0.1:%d", p.KubernetesPort)
	if f.kubeconfig, _, err = config.AdminKubeconfig(p.Name, server, secrets.KubernetesCA.CA(), now); err != nil {
		return f, err
	}
	f.clientConfig, err = clientConfig(p, secrets.MachineCA.CA(), now)
	return f, err
}

// clientConfig is for gbctl at this machine, which reaches each node through a
// port of the loopback, by its name or its address.
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
	for _, n := range p.controlPlanes() {
		context.Endpoints = append(context.Endpoints, n.Address.String())
	}
	c := client.Config{Context: p.Name, Contexts: map[string]*client.Context{p.Name: context}}
	return c.Encode()
}

func nodeConfiguration(p Plan, n Node, o Options, secrets *config.Secrets, now time.Time) ([]byte, error) {
	g := config.Options{
		ClusterName: p.Name,
		Endpoint:    "https://" + p.endpoint().String(),
		Type:        config.MachineType(n.Type),
		Hostname:    n.Name,
		Mirrors:     o.mirrors(p),
		// The user comes through a port of this machine's loopback.
		CertSANs: []string{"127.0.0.1", "localhost"},
		// Pods must have a place to run.
		AllowScheduling: len(p.controlPlanes()) == len(p.Nodes),
		Secrets:         secrets,
		Now:             now,
	}
	if p.Provisioner == QEMU {
		g.InstallDisk = qemuDisk
	}
	c, err := config.Generate(g)
	if err != nil {
		return nil, err
	}
	// The clock is this machine's in a container, and starts from it in QEMU; no
	// time server could be reached.
	c.Machine.Time.Disabled = true
	if p.Accelerator == "tcg" {
		c.Cluster.ControllerManager.ExtraArgs = alone
		c.Cluster.Scheduler.ExtraArgs = alone
	}
	if p.Provisioner == Container {
		c.Machine.Network.Interfaces = []config.Interface{{
			Name: "eth0",
			CIDR: netip.PrefixFrom(n.Address, p.Network.Bits()),
			// Leads nowhere: but Kubernetes takes its address from the default route.
			Routes: []config.Route{{Network: netip.MustParsePrefix("0.0.0.0/0"), Gateway: gateway(p.Network)}},
		}}
		if p.Shared.IsValid() && n.Type != string(config.Worker) {
			c.Machine.Network.Interfaces[0].VIP = &config.VIP{IP: p.Shared}
		}
	}
	text, err := c.Encode()
	if err != nil {
		return nil, err
	}
	return o.patched(n, text)
}

// mirrors ends with the registry that has what was built.
func (o Options) mirrors(p Plan) map[string][]string {
	all := maps.Clone(o.Mirrors)
	if all == nil {
		all = map[string][]string{}
	}
	all["*"] = append(slices.Clone(all["*"]), "http://"+p.registryAddress().String())
	return all
}

// patched applies the patches that are for a node.
func (o Options) patched(n Node, text []byte) (_ []byte, err error) {
	own := o.ControlPlanePatches
	if n.Type == string(config.Worker) {
		own = o.WorkerPatches
	}
	patches := slices.Concat(o.Patches, own)
	for _, p := range patches {
		if text, err = patch.Apply(text, p); err != nil {
			return nil, err
		}
	}
	if len(patches) > 0 {
		_, _, err = config.Load("patched configuration", text)
	}
	return text, err
}

// alone is for the controller manager and the scheduler of an emulated cluster,
// which has one node and so one of each. Ten times slower than a real one, a leader
// misses the 10 s in which it must renew its lease, ends, and starts all over; and
// after a power cut the next one waits for the old lease.
var alone = map[string]string{"leader-elect": "false"}

// adminValidity is how long the client configuration of a development cluster works.
const adminValidity = 365 * 24 * time.Hour
