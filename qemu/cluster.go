package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// readyBudget is for the host process to have its nodes started. It takes
	// less than a second; QEMU on a busy machine takes longest.
	readyBudget = 60 * time.Second
	// failBudget is for a host process that can't go on to end by itself.
	failBudget = 5 * time.Second
	// endBudget is how long a host process may take beyond its nodes' budget: a quarter of
	// a second for each, on an idle machine.
	endBudget = 10 * time.Second
	// endPoll is how late an interruption of that wait may be noticed.
	endPoll = 100 * time.Millisecond

	// statusBudget is for a question that a host process answers at once.
	statusBudget = 5 * time.Second

	logTail = 2 << 10 // of host.log, in an error
)

// Defaults of a node in QEMU. 4 GiB is twice what a control plane needs, for pods.
const (
	defaultCPUs      = 2
	defaultMemoryMiB = 4096
	defaultDiskGiB   = 20
)

// Options say what Up is to bring up. Name, Boot and Images are required.
type Options struct {
	Name        string
	Provisioner string // QEMU, Container, or Auto, the default
	Boot        Boot
	Images      string // directory of an OCI layout
	// Choice is what Choose said about Provisioner, if it was asked before.
	Choice Choice
	// ControlPlanes and Workers are how many nodes there are of each; default one
	// control plane.
	ControlPlanes, Workers int
	// Later is how many of the control planes stay off until they are turned on for the
	// first time: machines that a cluster may grow by.
	Later int
	// Network is where nodes are; default 10.5.0.0/24. The first address is
	// this machine's, with the registry and the load balancer.
	Network netip.Prefix
	// SharedAddress makes the cluster's endpoint an address that the control planes share,
	// the last of the network, instead of a load balancer.
	SharedAddress bool
	// Mirrors are registries that are asked instead of others, by host or "*", before the
	// one with the images that were built. This machine asks them for the nodes.
	Mirrors map[string][]string
	// KubernetesVersion is another one than what was built, from the mirrors.
	KubernetesVersion string
	InstallImage      string // of the installer
	// WireGuard is the network of a virtual private network between the nodes.
	WireGuard netip.Prefix
	// ClockOffset is how wrong the hardware clocks of QEMU nodes are.
	ClockOffset time.Duration
	// Patches change the configurations of all nodes, of control planes or of workers:
	// JSON patches or strategic merge patches.
	Patches, ControlPlanePatches, WorkerPatches [][]byte
	// Self is the command whose subcommand `host --cluster NAME` calls Host; default
	// this program.
	Self []string
	// CPUs and MemoryMiB are what a machine has, and what a container may take: as much
	// as there is, if they are 0.
	CPUs      int
	MemoryMiB int
	DiskGiB   int // of QEMU nodes; negative: no disk
	// Unplugged gives QEMU nodes a network that nobody else is on.
	Unplugged bool
	// Unconfigured keeps its configuration from a QEMU node, which then waits for one
	// over the machine API.
	Unconfigured bool
	// Prepare may change what a new node begins with, before it starts: in dir,
	// config.yaml, and disk.img (QEMU) or state and var (containers).
	Prepare func(dir string) error
	// Out is told in whole lines what happens.
	Out io.Writer
}

// Cluster is one that exists.
type Cluster struct {
	Plan
	// Made says that it was Up that made it, and Started that it didn't run before Up.
	// Where neither is so, it is another command's to end.
	Made, Started bool
	dir           clusterDir
}

// Open finds a cluster. The error is ErrNoCluster where there is none.
func Open(name string) (*Cluster, error) {
	d, err := dirOf(name)
	if err != nil {
		return nil, err
	}
	p, err := readPlan(d)
	if err != nil {
		return nil, err
	}
	return &Cluster{Plan: p, dir: d}, nil
}

// List finds all clusters, sorted by name, also if it returns an error: that is of those
// that are damaged. One that is removed meanwhile is none.
func List() ([]*Cluster, error) {
	home, err := Home()
	if err != nil {
		return nil, err
	}
	plans, err := filepath.Glob(filepath.Join(home, "*", "plan.json"))
	if err != nil {
		return nil, err
	}
	var all []*Cluster
	var damaged []error
	for _, p := range plans {
		name := filepath.Base(filepath.Dir(p))
		if checkName(name) != nil {
			continue // a copy that somebody made: it can't be one's name
		}
		c, err := Open(name)
		if errors.Is(err, ErrNoCluster) {
			continue
		}
		if err != nil {
			damaged = append(damaged, err)
			continue
		}
		all = append(all, c)
	}
	return all, errors.Join(damaged...)
}

// Find is a node by its name, which may be given without the cluster's before it.
func (c *Cluster) Find(name string) (Node, error) {
	var names []string
	for _, n := range c.Nodes {
		if n.Name == name || n.Name == c.Name+"-"+name {
			return n, nil
		}
		names = append(names, n.Name)
	}
	return Node{}, fmt.Errorf("cluster %s has no node %q; there are %s", c.Name, name, strings.Join(names, ", "))
}

// Dir is the cluster's directory.
func (c *Cluster) Dir() string { return string(c.dir) }

// Kubeconfig is the file for kubectl.
func (c *Cluster) Kubeconfig() string { return c.dir.kubeconfig() }

// ClientConfig is the file for gbctl.
func (c *Cluster) ClientConfig() string { return c.dir.clientConfig() }

// Configuration is the file with the configuration that a node began with.
func (c *Cluster) Configuration(node string) string { return c.dir.config(node) }

// Console is the file with a node's console.
func (c *Cluster) Console(node string) string { return c.dir.console(node) }

// Status asks the host process for its nodes. The error is ErrSilent where it only starts,
// stops, or hangs.
func (c *Cluster) Status(ctx context.Context) ([]NodeStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, statusBudget)
	defer cancel()
	var s []NodeStatus
	return s, ask(ctx, c.dir, http.MethodGet, "/status", &s)
}

// HostPID is the cluster's host process, 0 if the cluster is off.
func (c *Cluster) HostPID() (int, error) { return holder(c.dir.lock()) }

// On starts a node that is off.
func (c *Cluster) On(ctx context.Context, node string) error { return c.verb(ctx, node, "on") }

// Off presses a node's power button and waits until it's off.
func (c *Cluster) Off(ctx context.Context, node string) error { return c.verb(ctx, node, "off") }

// Cut takes a node's power away.
func (c *Cluster) Cut(ctx context.Context, node string) error { return c.verb(ctx, node, "cut") }

// Freeze stops a node's time.
func (c *Cluster) Freeze(ctx context.Context, node string) error { return c.verb(ctx, node, "freeze") }

// Thaw lets it run on.
func (c *Cluster) Thaw(ctx context.Context, node string) error { return c.verb(ctx, node, "thaw") }

// SetEndpoint turns the cluster's endpoint on or off, where it is a load balancer. Who
// runs the cluster reaches its API in any case.
func (c *Cluster) SetEndpoint(ctx context.Context, on bool) error {
	verb := map[bool]string{true: "on", false: "off"}[on]
	return ask(ctx, c.dir, http.MethodPost, "/endpoint/"+verb, nil)
}

func (c *Cluster) verb(ctx context.Context, node, verb string) error {
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/"+verb, nil)
}

// Up brings a cluster up: a new one, or one that exists, with its state. What runs
// already and boots the same keeps running. When it returns, the nodes have
// started; Kubernetes hasn't yet. If a new cluster can't be brought up, or ctx
// ends, nothing remains of it.
func Up(ctx context.Context, o Options) (_ *Cluster, err error) {
	d, err := dirOf(o.Name)
	if err != nil {
		return nil, err
	}
	release, err := waitFor(ctx, o.Name, func() { o.say("waiting for another command at cluster %s", o.Name) })
	if err != nil {
		return nil, err
	}
	defer release()
	plan, err := readPlan(d)
	made, ran := errors.Is(err, ErrNoCluster), 0
	switch {
	case made:
		if plan, err = create(ctx, d, o); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				// Not with ctx: it may have ended, and this must be done still.
				err = errors.Join(err, remove(context.Background(), d))
			}
		}()
	case err != nil:
		return nil, err
	default:
		if ran, err = holder(d.lock()); err != nil {
			return nil, err
		}
		if plan, err = renew(ctx, d, plan, o); err != nil {
			return nil, err
		}
	}
	c := &Cluster{Plan: plan, dir: d, Made: made, Started: ran == 0}
	if running, err := c.awaitHost(ctx); running || err != nil {
		return c, err
	}
	if c.Self, err = d.keepProgram(o.self()); err != nil {
		return nil, err
	}
	if err := writePlan(d, c.Plan); err != nil {
		return nil, err
	}
	err = spawnHost(ctx, d, c.Plan, o)
	if err != nil && ctx.Err() == nil {
		// The host process of a command that was killed may have been quicker.
		if running, again := c.awaitHost(ctx); running && again == nil {
			return c, nil
		}
	}
	return c, err
}

// awaitHost turns all nodes on if there is a host process, also one whose starter is gone
// before it was ready.
func (c *Cluster) awaitHost(ctx context.Context) (running bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, readyBudget)
	defer cancel()
	for {
		pid, err := c.HostPID()
		if pid == 0 || err != nil {
			return false, err
		}
		err = c.turnOnAll(ctx)
		if !errors.Is(err, ErrSilent) {
			return true, err
		}
		select {
		case <-ctx.Done():
			return true, err
		case <-time.After(endPoll):
		}
	}
}

// fits is whether a cluster that exists is what is asked for.
func (o Options) fits(plan Plan) error {
	if o.Provisioner != "" && o.Provisioner != Auto && o.Provisioner != plan.Provisioner {
		return fmt.Errorf("cluster %s exists with provisioner %s; remove it first, or take another name", plan.Name, plan.Provisioner)
	}
	c := len(plan.controlPlanes())
	if w := len(plan.Nodes) - c; o.ControlPlanes != 0 && (o.ControlPlanes != c || o.Workers != w) {
		return fmt.Errorf("cluster %s exists with %s; remove it first, or take another name", plan.Name, counted(c, w))
	}
	return nil
}

// renew takes over what the caller boots now, and stops a cluster that boots
// something else.
func renew(ctx context.Context, d clusterDir, plan Plan, o Options) (Plan, error) {
	if err := o.fits(plan); err != nil {
		return plan, err
	}
	next := plan
	if err := d.keep(ctx, &next, o); err != nil {
		return plan, err
	}
	if next.Source != plan.Source || next.Boot.Cmdline != plan.Boot.Cmdline {
		o.say("What cluster %s boots has changed: restarting its nodes.", plan.Name)
		if err := stopHost(ctx, d, plan.stopBudget()); err != nil {
			return plan, err
		}
	}
	if err := writePlan(d, next); err != nil {
		return plan, err
	}
	return next, d.forget(next)
}

func (c *Cluster) turnOnAll(ctx context.Context) error {
	for _, n := range c.atOnce() {
		if err := c.On(ctx, n.Name); err != nil {
			return err
		}
	}
	return nil
}

func (o Options) say(format string, args ...any) {
	if o.Out != nil {
		fmt.Fprintf(o.Out, format+"\n", args...)
	}
}

func (o Options) self() []string {
	if len(o.Self) > 0 {
		return o.Self
	}
	// An error is the proc file system's absence; starting the host then says so.
	self, _ := os.Executable()
	return []string{self}
}

// spawnHost starts the host process, on its own from then on, and waits for its
// word.
func spawnHost(ctx context.Context, d clusterDir, plan Plan, o Options) error {
	log, err := os.OpenFile(d.log(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	hear, speak, err := os.Pipe()
	if err != nil {
		return err
	}
	defer hear.Close()
	args := append(plan.Self[1:len(plan.Self):len(plan.Self)], "host", "--cluster", plan.Name)
	cmd := exec.Command(plan.Self[0], args...)
	cmd.Dir = "/"
	// Which a relative directory would lead elsewhere from.
	cmd.Env = append(os.Environ(), homeVar+"="+filepath.Dir(filepath.Dir(string(d))))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{speak} // reportFD
	cmd.SysProcAttr = hostAttributes(os.Geteuid(), os.Getegid())
	err = cmd.Start()
	speak.Close()
	if err != nil {
		return fmt.Errorf("start the host process: %w; users other than root need user namespaces for the nodes' network", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }() // so that it doesn't become a zombie of ours
	answer := make(chan report, 1)
	go func() {
		var r report
		words := json.NewDecoder(hear)
		for !r.Ready && r.Error == "" {
			r = report{}
			if words.Decode(&r) != nil {
				r = report{Error: "the host process ended without a word: " + strings.TrimSpace(readLast(d.log(), logTail))}
			}
			if r.Step != "" {
				o.say("%s", r.Step)
			}
		}
		answer <- r
	}()
	heard := false
	select {
	case r := <-answer:
		if r.Ready {
			return nil
		}
		heard, err = true, errors.New(r.Error)
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(readyBudget):
		err = fmt.Errorf("the host process isn't ready within %s; see %s", readyBudget, d.log())
	}
	// It either ends by itself or must not go on; the nodes die with it.
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-exited:
	case <-time.After(failBudget):
		_ = cmd.Process.Kill()
		<-exited
	}
	if !heard {
		hear.Close() // so that nothing is said after this
		<-answer
	}
	return err
}

// hostAttributes are those of a process of its own. Networks take rights that only root
// has; so another user's host process is the root of a user namespace, which is
// nobody outside (user_namespaces(7)), and makes them there.
func hostAttributes(uid, gid int) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if uid != 0 {
		a.Cloneflags = syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}}
	}
	return a
}
