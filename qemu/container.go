package qemu

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/garboard-os/garboard/qemu/cgroup"
	"github.com/vishvananda/netlink"
)

// Exit codes of the sandbox program (services/front/sandbox/cmd/sandbox/node.go).
const (
	sandboxReboot = 10
	sandboxDied   = 11
	sandboxKilled = 12
)

// sandboxSpec is what the sandbox program reads (services/front/sandbox/cmd/sandbox/spec.go).
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

// containers runs nodes in namespaces.
type containers struct {
	*lan
}

func newContainers(l *lan) (*containers, error) {
	if err := cgroup.Remove(l.dir.cgroup()); err != nil {
		return nil, fmt.Errorf("remove what an earlier run left: %w", err)
	}
	switch was, err := raise(inotifyLimit, inotifyInstances); {
	case err != nil:
		l.log.Warn("too many container nodes may fail for want of inotify instances", "error", err)
	case was < inotifyInstances:
		l.log.Info("raised a limit of this machine, which all container nodes share", "file", inotifyLimit, "from", was, "to", inotifyInstances)
	}
	return &containers{l}, nil
}

// cgroup is where all nodes of a cluster are. There may be another of its name in the home
// of somebody else, or in another one of the same user.
func (d clusterDir) cgroup() string {
	sum := sha256.Sum256([]byte(d))
	return filepath.Join(cgroup.Parent, filepath.Base(string(d))+"."+hex.EncodeToString(sum[:4]))
}

// NodeProcesses are the PIDs, on this machine, of all that runs in a container node.
func (c *Cluster) NodeProcesses(node string) ([]int, error) {
	return cgroup.Processes(filepath.Join(c.dir.cgroup(), node))
}

// makeLink makes a node's cable: our end on the bridge, the other one to be taken
// by the node. It ends with the node's namespace, so each start makes a new one.
func (c *containers) makeLink(n Node) (peer string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ours := linkName("node", n)
	peer = "to-" + ours
	if err := c.dropLink(n); err != nil {
		return "", err
	}
	veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: peer, PeerHardwareAddr: hardwareAddress(c.plan.Name, n.Name)}
	veth.Name = ours
	if err := c.links.LinkAdd(veth); err != nil {
		return "", fmt.Errorf("make the link of %s: %w", n.Name, err)
	}
	return peer, c.connect(n)
}

func (c *containers) spec(n Node, link string) sandboxSpec {
	spec := sandboxSpec{
		ID:        c.plan.Name + "." + n.Name,
		Hostname:  n.Name,
		Rootfs:    c.plan.Boot.Rootfs,
		Work:      c.dir.work(n.Name),
		Cgroup:    filepath.Join(c.dir.cgroup(), n.Name),
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
	if err := c.thread.Do(r.cmd.Start); err != nil {
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
			if err := cgroup.Limit(spec.Cgroup, cgroup.Limits{CPUs: n.CPUs, MemoryMiB: n.MemoryMiB}); err != nil {
				r.Cut()
				<-r.done
				return nil, fmt.Errorf("start %s: %w", n.Name, err)
			}
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

func (c *containers) Close() error { return cgroup.Remove(c.dir.cgroup()) }

type runningContainer struct {
	cmd       *exec.Cmd
	cgroup    string
	pressed   sync.Once    // the power button
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

func (r *runningContainer) PowerOff(context.Context) (err error) {
	_ = cgroup.Freeze(r.cgroup, false) // gone already, if it can't
	// The second time, the sandbox would cut the power.
	r.pressed.Do(func() { err = r.cmd.Process.Signal(syscall.SIGTERM) })
	return err
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
