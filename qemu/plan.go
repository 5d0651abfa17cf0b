// Package qemu runs development clusters: whole nodes on this machine, as virtual machines
// (package vm) or as containers (package container), in a network of their own (package
// network).
//
//	gbctl / dev ── Up, Down … ──► ~/.garboard/clusters/NAME/   plan.json, kubeconfig, NODE/…
//	     │ starts, and connects to control.sock    ▲
//	     ▼                                         │
//	host process of the cluster ──────────────────-┘
//	     ├─ sandbox or QEMU, one per node (they end with the host process)
//	     ├─ registry of the images, for nodes only; mirrors of the user's registries
//	     ├─ DHCP, for virtual machines
//	     ├─ load balancer, for nodes: the first address of their network ─► their Kubernetes API,
//	     │  unless the control planes share an address
//	     ├─ 127.0.0.1:PORT ─► the same
//	     └─ 127.0.0.1:PORT ─► the machine API, one port for each node
//
// One process per cluster owns everything that runs. If it is killed in any way, the kernel
// ends every node, network and mount with it. Only files remain, which is intended, and empty
// cgroups, which the next Up or Down removes.
package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/vm"
)

// Plan describes a cluster. It is written once, and later changes only with the files that
// the cluster boots.
type Plan struct {
	Name        string       `json:"name"`
	Provisioner string       `json:"provisioner"` // QEMU, Container or Docker
	Accelerator string       `json:"accelerator,omitempty"`
	Network     netip.Prefix `json:"network"` // of the nodes
	// Second is their network of the other address family; invalid: they have none.
	Second netip.Prefix `json:"secondNetwork,omitzero"`
	// Shared is the address that the control planes share, and the cluster's endpoint, and
	// SecondShared the one in Second; invalid: they share none.
	Shared       netip.Addr `json:"shared,omitzero"`
	SecondShared netip.Addr `json:"secondShared,omitzero"`
	// Mirrors are registries outside of the nodes' network.
	Mirrors []network.Mirror `json:"mirrors,omitempty"`
	// Internet: nodes and pods have a way out of their network.
	Internet bool `json:"internet,omitempty"`
	// Unplugged gives nodes in QEMU a network card that is connected to nothing.
	Unplugged bool `json:"unplugged,omitempty"`
	// Unconfigured starts nodes in QEMU without a configuration: they come up in
	// maintenance mode.
	Unconfigured bool   `json:"unconfigured,omitempty"`
	Boot         Boot   `json:"boot"`
	Images       string `json:"images"` // OCI layout
	// Kubernetes are the versions in Images besides config.KubernetesVersion.
	Kubernetes []string `json:"kubernetes,omitempty"`
	// SelfHosted: the control plane was made self-hosted, and Images have the pod-checkpointer.
	SelfHosted bool `json:"selfHosted,omitempty"`
	// Source identifies the originals of Boot and Images.
	Source string `json:"source"`
	// KubernetesPort on 127.0.0.1 forwards to the API of the control planes.
	KubernetesPort int    `json:"kubernetesPort"`
	Nodes          []Node `json:"nodes"`
	// Self is the program, with arguments, whose subcommand `host` calls Host.
	Self []string `json:"self"`
}

func (p Plan) controlPlanes() []Node {
	return slices.DeleteFunc(slices.Clone(p.Nodes), func(n Node) bool { return n.Type == "worker" })
}

// atOnce are the nodes that are turned on together with the cluster.
func (p Plan) atOnce() []Node {
	return slices.DeleteFunc(slices.Clone(p.Nodes), func(n Node) bool { return n.Later })
}

// balanced reports whether the cluster's endpoint is a load balancer. A single node is its
// own endpoint: with nothing in between, nothing can fail there.
func (p Plan) balanced() bool { return len(p.Nodes) > 1 && !p.Shared.IsValid() }

// endpoint is the address of the Kubernetes API for nodes.
func (p Plan) endpoint() netip.AddrPort {
	if p.Shared.IsValid() {
		return netip.AddrPortFrom(p.Shared, kubernetesPort)
	}
	if p.balanced() {
		return netip.AddrPortFrom(network.Gateway(p.Network), kubernetesPort)
	}
	return netip.AddrPortFrom(p.Nodes[0].Address, kubernetesPort)
}

// subnets are those of pods and services: of the families of the nodes' networks; none: the default, which is IPv4.
func (p Plan) subnets() (pods, services []netip.Prefix) {
	if p.Network.Addr().Is4() && !p.Second.IsValid() {
		return nil, nil
	}
	for _, network := range []netip.Prefix{p.Network, p.Second} {
		switch {
		case network.Addr().Is4():
			pods, services = append(pods, config.DefaultPodSubnet), append(services, config.DefaultServiceSubnet)
		case network.Addr().Is6():
			pods, services = append(pods, podSubnet6), append(services, serviceSubnet6)
		}
	}
	return pods, services
}

// Subnets of IPv6: those of kind, which fit kubeadm's of IPv4.
var podSubnet6, serviceSubnet6 = netip.MustParsePrefix("fd00:10:244::/56"), netip.MustParsePrefix("fd00:10:96::/112")

// localAddress is where the host process listens for users. In Docker, the network container does, and Docker forwards
// to it from 127.0.0.1.
func (p Plan) localAddress() string {
	if p.Provisioner == Docker {
		return "0.0.0.0"
	}
	return "127.0.0.1"
}

// readyBudget is for the host process to start the nodes.
func (p Plan) readyBudget() time.Duration {
	if p.Provisioner == Docker {
		return readyBudget + loadBudget
	}
	return readyBudget
}

// router is the nodes' default gateway. Docker has one that leads out of the network.
func (p Plan) router() netip.Addr {
	if p.Provisioner == Docker {
		return last(p.Network).Prev()
	}
	return network.Gateway(p.Network)
}

// Boot has the paths of the files that nodes boot.
type Boot struct {
	Kernel    string `json:"kernel,omitempty"`    // QEMU
	Initramfs string `json:"initramfs,omitempty"` // QEMU
	// Medium is what machines boot instead: an image of a CD or of a USB stick.
	Medium string `json:"medium,omitempty"`
	// Disk is the compressed image of a disk, with which the disks of machines begin.
	Disk string `json:"disk,omitempty"`
	// Network is a directory with files for a boot over the network.
	Network string `json:"network,omitempty"`
	// Installer is the OCI layout of the installer image, for the registry.
	Installer string `json:"installer,omitempty"`
	// UEFI gives machines this firmware instead of a BIOS.
	UEFI bool `json:"uefi,omitempty"`
	// Cmdline is added to the kernel's command line.
	Cmdline string `json:"cmdline,omitempty"`
	Rootfs  string `json:"rootfs,omitempty"`  // containers: squashfs image or directory
	Init    string `json:"init,omitempty"`    // containers: PID 1, if Rootfs has only an empty file in its place
	Sandbox string `json:"sandbox,omitempty"` // containers: the sandbox program
}

// medium is what firmware boots from in a machine, where it isn't a device of the machine's hardware.
func (b Boot) medium() string {
	switch {
	case b.Disk != "":
		return vm.OwnDisk
	case b.Network != "":
		return vm.HTTP
	}
	return ""
}

// Node is one machine.
type Node struct {
	Name      string     `json:"name"`
	Type      string     `json:"type"` // machine.type of its configuration
	Address   netip.Addr `json:"address"`
	Second    netip.Addr `json:"secondAddress,omitzero"`
	APIPort   int        `json:"apiPort"`   // on 127.0.0.1, forwards to its machine API
	CPUs      int        `json:"cpus"`      // of a container: its limit, 0 for none
	MemoryMiB int        `json:"memoryMiB"` // likewise
	DiskGiB   int        `json:"diskGiB"`   // QEMU; sparse; negative: none
	// Disks is how many disks a node in QEMU has; 0: one.
	Disks int `json:"disks,omitempty"`
	// Hardware has the devices of a node in QEMU.
	Hardware vm.Hardware `json:"hardware,omitzero"`
	// Later is a node that isn't turned on with the others.
	Later bool `json:"later,omitempty"`
	// ClockOffset is how wrong a machine's clock is when it is turned on.
	ClockOffset time.Duration `json:"clockOffset,omitempty"`
}

// clusterName is the form of names, which are part of paths, cgroups and links.
var clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

func checkName(name string) error {
	if !clusterName.MatchString(name) {
		return fmt.Errorf("cluster name %q: must be 1 to 40 of a-z, 0-9 and -, with no - at the ends", name)
	}
	return nil
}

// stopBudget is how long the nodes may take to power off.
func (p Plan) stopBudget() time.Duration {
	if p.Accelerator == "tcg" {
		return stopBudgetEmulated
	}
	return stopBudget
}

const homeVar = "GARBOARD_HOME"

// Home is the directory that holds all clusters: ~/.garboard/clusters, or
// $GARBOARD_HOME/clusters.
func Home() (string, error) {
	base := os.Getenv(homeVar)
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		base = filepath.Join(home, ".garboard")
	}
	return filepath.Abs(filepath.Join(base, "clusters"))
}

// clusterDir is the directory of one cluster.
type clusterDir string

func dirOf(name string) (clusterDir, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	home, err := Home()
	return clusterDir(filepath.Join(home, name)), err
}

func (d clusterDir) file(name string) string { return filepath.Join(string(d), name) }

func (d clusterDir) plan() string              { return d.file("plan.json") }
func (d clusterDir) lock() string              { return d.file("lock") }
func (d clusterDir) log() string               { return d.file("host.log") }
func (d clusterDir) images() string            { return d.file("images") }
func (d clusterDir) socket() string            { return d.file("control.sock") }
func (d clusterDir) kubeconfig() string        { return d.file("kubeconfig") }
func (d clusterDir) clientConfig() string      { return d.file("garboardconfig") }
func (d clusterDir) node(n string) string      { return d.file(n) }
func (d clusterDir) config(n string) string    { return filepath.Join(d.node(n), "config.yaml") }
func (d clusterDir) console(n string) string   { return filepath.Join(d.node(n), "console.log") }
func (d clusterDir) chart(n string) string     { return filepath.Join(d.node(n), "boot-chart.svg") }
func (d clusterDir) disk(n string) string      { return filepath.Join(d.node(n), "disk.img") }
func (d clusterDir) variables(n string) string { return filepath.Join(d.node(n), "uefi-variables.img") }

// mainboard is a text that a test gives a node while it is off, in place of its mainboard.
func (d clusterDir) mainboard(n string) string {
	text, _ := os.ReadFile(filepath.Join(d.node(n), "mainboard"))
	return string(text)
}

func (d clusterDir) work(n string) string      { return filepath.Join(d.node(n), "work") }
func (d clusterDir) state(n string) string     { return filepath.Join(d.node(n), "state") }
func (d clusterDir) ephemeral(n string) string { return filepath.Join(d.node(n), "var") }

// ErrNoCluster is the error where no cluster has the name.
var ErrNoCluster = errors.New("there is no such cluster")

func readPlan(d clusterDir) (Plan, error) {
	data, err := os.ReadFile(d.plan())
	if errors.Is(err, os.ErrNotExist) {
		return Plan{}, fmt.Errorf("cluster %s: %w", filepath.Base(string(d)), ErrNoCluster)
	}
	if err != nil {
		return Plan{}, err
	}
	var p Plan
	if err := json.Unmarshal(data, &p); err != nil {
		name := filepath.Base(string(d))
		return Plan{}, fmt.Errorf("cluster %s: its plan is damaged, and 'gbctl cluster destroy --name %s' removes it: %s: %w", name, name, d.plan(), err)
	}
	return p, nil
}

func writePlan(d clusterDir, p Plan) error {
	data, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return replace(d.plan(), append(data, '\n'), 0o600)
}

// replace writes a file so that readers see the old or the new content, and never a part.
// It does not sync: the files of a development cluster need not survive a crash of this
// machine.
func replace(path string, data []byte, perm os.FileMode) error {
	partial := path + ".partial"
	defer os.Remove(partial)
	if err := os.WriteFile(partial, data, perm); err != nil {
		return err
	}
	if err := os.Chmod(partial, perm); err != nil {
		return err
	}
	return os.Rename(partial, path)
}
