package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/garboard-os/garboard/qemu/cgroup"
	"github.com/garboard-os/garboard/qemu/keeper"
	"github.com/garboard-os/garboard/qemu/registry"
	"github.com/garboard-os/garboard/qemu/wire"
	"github.com/vishvananda/netlink"
)

const bridgeName = "nodes"

// Exit codes of the sandbox program (services/sandbox/node.go).
const (
	sandboxReboot = 10
	sandboxDied   = 11
	sandboxKilled = 12
)

// sandboxSpec is what the sandbox program reads (services/sandbox/spec.go).
type sandboxSpec struct {
	ID        string        `json:"id"`
	Hostname  string        `json:"hostname"`
	Rootfs    string        `json:"rootfs"`
	Work      string        `json:"work"`
	Cgroup    string        `json:"cgroup"`
	NetDevice string        `json:"netDevice,omitempty"`
	Binds     []sandboxBind `json:"binds,omitempty"`
	Args      []string      `json:"args"`
	Console   string        `json:"console"`
}

type sandboxBind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// containers runs nodes in namespaces, on a bridge in a network namespace that
// only this process knows:
//
//	host process ── keeper's namespace: bridge 10.5.0.1/24, registry on :5000,
//	                   │                load balancer on :6443
//	                   ├─ veth ── eth0 of node 1
//	                   └─ veth ── eth0 of node 2
//
// There is no way out of it, so no node ever reaches another machine, and two
// clusters may use the same addresses.
type containers struct {
	plan   Plan
	dir    clusterDir
	log    *slog.Logger
	keeper *keeper.Keeper
	links  *netlink.Handle // into the keeper's namespace
	images net.Listener

	mu       sync.Mutex // guards all below
	networks map[string]Network
	wires    map[string]*wire.Wire // of those whose network is bad
}

func newContainers(p Plan, d clusterDir, log *slog.Logger) (_ *containers, err error) {
	if err := cgroup.Remove(clusterCgroup(p.Name)); err != nil {
		return nil, fmt.Errorf("remove what an earlier run left: %w", err)
	}
	k, err := keeper.NewInNamespace()
	if err != nil {
		return nil, err
	}
	c := &containers{plan: p, dir: d, log: log, keeper: k, networks: map[string]Network{}, wires: map[string]*wire.Wire{}}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if err := k.Do(func() (err error) { c.links, err = netlink.NewHandle(); return err }); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if err := c.makeBridge(); err != nil {
		return nil, fmt.Errorf("make the cluster's bridge: %w", err)
	}
	if c.images, err = k.Listen(p.registryAddress().String()); err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	go serve(c.images, registry.New(p.Images), log)
	return c, nil
}

// serve answers HTTP until l is closed.
func serve(l net.Listener, h http.Handler, log *slog.Logger) {
	if err := http.Serve(l, h); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Error("serve", "address", l.Addr(), "error", err)
	}
}

func clusterCgroup(cluster string) string { return filepath.Join(cgroup.Parent, cluster) }

func (c *containers) makeBridge() error {
	lo, err := c.links.LinkByName("lo")
	if err != nil {
		return err
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = bridgeName
	// Of its own: otherwise it changes with the nodes that come and go, and the others
	// lose the load balancer until they have asked for its address again.
	bridge.HardwareAddr = hardwareAddress(c.plan.Name, bridgeName)
	if err := c.links.LinkAdd(bridge); err != nil {
		return err
	}
	address := netip.PrefixFrom(gateway(c.plan.Network), c.plan.Network.Bits())
	if err := c.links.AddrAdd(bridge, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
		return err
	}
	return errors.Join(c.links.LinkSetUp(lo), c.links.LinkSetUp(bridge))
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// makeLink makes a node's cable: our end on the bridge, the other one to be taken
// by the node. It ends with the node's namespace, so each start makes a new one.
func (c *containers) makeLink(n Node) (peer string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ours := linkName("node", n)
	peer = "to-" + ours
	if old, err := c.links.LinkByName(ours); err == nil {
		if err := c.links.LinkDel(old); err != nil {
			return "", fmt.Errorf("remove the old link of %s: %w", n.Name, err)
		}
	}
	veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: peer, PeerHardwareAddr: hardwareAddress(c.plan.Name, n.Name)}
	veth.Name = ours
	if err := c.links.LinkAdd(veth); err != nil {
		return "", fmt.Errorf("make the link of %s: %w", n.Name, err)
	}
	return peer, c.connect(n)
}

// hardwareAddress is a node's MAC address: always the same, and locally
// administered (IEEE 802: second bit of the first octet).
func hardwareAddress(cluster, node string) net.HardwareAddr {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%s", cluster, node)
	sum := h.Sum(nil)
	return net.HardwareAddr{0x02, 'g', sum[4], sum[5], sum[6], sum[7]}
}

func (c *containers) spec(n Node, link string) sandboxSpec {
	spec := sandboxSpec{
		ID:        c.plan.Name + "." + n.Name,
		Hostname:  n.Name,
		Rootfs:    c.plan.Boot.Rootfs,
		Work:      c.dir.work(n.Name),
		Cgroup:    filepath.Join(clusterCgroup(c.plan.Name), n.Name),
		NetDevice: link,
		Binds: []sandboxBind{
			{Source: c.dir.state(n.Name), Target: "/system/state"},
			{Source: c.dir.ephemeral(n.Name), Target: "/var"},
			{Source: c.dir.config(n.Name), Target: "/run/garboard-seed/config.yaml", ReadOnly: true},
		},
		Args:    []string{"/sbin/init", "--mode=container"},
		Console: c.dir.console(n.Name),
	}
	if c.plan.Boot.Init != "" {
		spec.Binds = append(spec.Binds, sandboxBind{Source: c.plan.Boot.Init, Target: spec.Args[0], ReadOnly: true})
	}
	return spec
}

func (c *containers) Start(ctx context.Context, n Node) (Running, error) {
	for _, dir := range []string{c.dir.work(n.Name), c.dir.state(n.Name), c.dir.ephemeral(n.Name)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	spec := c.spec(n, "")
	if err := cgroup.Remove(spec.Cgroup); err != nil {
		return nil, fmt.Errorf("remove cgroups of the last run: %w", err)
	}
	link, err := c.makeLink(n)
	if err != nil {
		return nil, err
	}
	spec.NetDevice = link
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	r := &runningContainer{cgroup: spec.Cgroup, done: make(chan struct{})}
	r.cmd = exec.Command(c.plan.Boot.Sandbox, "node", "-")
	r.cmd.Stdin = bytes.NewReader(text)
	r.cmd.Stderr = &r.complaint
	r.cmd.SysProcAttr = &syscall.SysProcAttr{
		// The sandbox demands it; see its runNode for why.
		Cloneflags: syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.keeper.Do(r.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", n.Name, err)
	}
	// One line on its output says that the node's PID 1 runs; the end of it, that
	// it never will.
	started := make(chan error, 1)
	go func() {
		_, err := bufio.NewReader(out).ReadString('\n')
		started <- err
		_, _ = io.Copy(io.Discard, out)
		r.collect()
	}()
	select {
	case err := <-started:
		if err == nil {
			return r, nil
		}
		<-r.done
		return nil, fmt.Errorf("start %s: %w", n.Name, r.err)
	case <-ctx.Done():
		r.Cut()
		<-r.done
		return nil, ctx.Err()
	}
}

func (c *containers) Reach(ctx context.Context, n Node, port int) (net.Conn, error) {
	return c.keeper.Dial(ctx, netip.AddrPortFrom(n.Address, uint16(port)).String())
}

func (c *containers) Listen(address netip.AddrPort) (net.Listener, error) {
	return c.keeper.Listen(address.String())
}

func (c *containers) Close() error {
	var errs []error
	if c.images != nil {
		errs = append(errs, c.images.Close())
	}
	c.mu.Lock()
	for _, w := range c.wires {
		errs = append(errs, w.Close())
	}
	c.mu.Unlock()
	if c.links != nil {
		c.links.Close()
	}
	errs = append(errs, c.keeper.Close(), cgroup.Remove(clusterCgroup(c.plan.Name)))
	return errors.Join(errs...)
}

type runningContainer struct {
	cmd       *exec.Cmd
	cgroup    string
	complaint bytes.Buffer // standard error; complete when done is closed

	done chan struct{} // closed when the two below are set
	end  End
	err  error
}

func (r *runningContainer) collect() {
	defer close(r.done)
	err := r.cmd.Wait()
	code := r.cmd.ProcessState.ExitCode()
	switch {
	case err == nil:
		r.end = EndOff
	case code == sandboxReboot:
		r.end = EndReboot
	case code == sandboxDied:
		r.end = EndDied
	case code == sandboxKilled || r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled():
		r.end = EndKilled
	default:
		r.end = EndFailed
		r.err = err
		if text := strings.TrimSpace(r.complaint.String()); text != "" {
			r.err = errors.New(text)
		}
	}
}

func (r *runningContainer) Wait() (End, error) {
	<-r.done
	return r.end, r.err
}

func (r *runningContainer) PowerOff(context.Context) error {
	_ = cgroup.Freeze(r.cgroup, false) // gone already, if it can't
	return r.cmd.Process.Signal(syscall.SIGTERM)
}

// Cut kills the sandbox: it is the first of the PID namespace that all of the
// node is in. It can be gone already. With cgroup v1, what is frozen doesn't die
// until it is let go.
func (r *runningContainer) Cut() {
	_ = r.cmd.Process.Kill()
	_ = cgroup.Freeze(r.cgroup, false)
}

func (r *runningContainer) Freeze(_ context.Context, frozen bool) error {
	return cgroup.Freeze(r.cgroup, frozen)
}
