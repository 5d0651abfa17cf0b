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

	"github.com/garboard-os/garboard/qemu/vm"
)

const (
	// readyBudget is for the host process to start its nodes. It takes less than a second;
	// QEMU on a busy machine takes longest.
	readyBudget = 60 * time.Second
	// loadBudget is added to it for Docker to load the image of the nodes.
	loadBudget = 4 * time.Minute
	// failBudget is for a host process that has failed to end by itself.
	failBudget = 5 * time.Second
	// endBudget is added to the nodes' budget for the host process to end: a quarter of a
	// second for each node, on an idle machine.
	endBudget = 10 * time.Second
	// endPoll is the largest delay with which an interruption of that wait is noticed.
	endPoll = 100 * time.Millisecond

	// statusBudget is for a request that a host process answers at once.
	statusBudget = 5 * time.Second

	logTail = 2 << 10 // of host.log, in an error
)

// Defaults of a node in QEMU. A control plane needs half of 4 GiB; the rest is for pods.
const (
	defaultCPUs      = 2
	defaultMemoryMiB = 4096
	defaultDiskGiB   = 20
	maxDisks         = 8
)

// Options describe the cluster that Up brings up. Name, Boot and Images are required.
type Options struct {
	Name        string
	Provisioner string // QEMU, Container, Docker, or Auto, the default
	Boot        Boot
	Images      string // directory of an OCI layout
	// Kubernetes are the versions in Images besides config.KubernetesVersion.
	Kubernetes []string
	// Choice is the result of Choose for Provisioner. Zero: Up calls Choose.
	Choice Choice
	// ControlPlanes and Workers are the numbers of nodes of each type; default one control
	// plane.
	ControlPlanes, Workers int
	// Later is how many of the control planes stay off until they are turned on for the
	// first time: machines with which the cluster can be extended.
	Later int
	// Network has the addresses of the nodes; default 10.5.0.0/24. The first address is
	// this machine's, with the registry and the load balancer.
	Network netip.Prefix
	// Second is the nodes' network of the other address family; default: they have none.
	Second netip.Prefix
	// SharedAddress makes the cluster's endpoint an address that the control planes share,
	// the last of the network, instead of a load balancer.
	SharedAddress bool
	// Mirrors are URLs of registry mirrors, by host or "*". Nodes use them before the registry with the images that
	// were built, which is the last one of every host. This machine forwards the nodes' requests to them.
	Mirrors map[string][]string
	// Internet gives nodes and pods a way to the networks of this machine, by IPv4; default: none.
	Internet bool
	// KubernetesVersion is the version of a new cluster; default config.KubernetesVersion.
	// If Images doesn't have it, its images come from the mirrors.
	KubernetesVersion string
	InstallImage      string // of the installer
	// SelfHosted: Images have the pod-checkpointer. selfhosted.Convert makes the control plane
	// of a new cluster self-hosted, once it is ready.
	SelfHosted bool
	// WireGuard is the network of a virtual private network between the nodes.
	WireGuard netip.Prefix
	// ClockOffset is how wrong the hardware clocks of QEMU nodes are.
	ClockOffset time.Duration
	// Patches change the configurations of all nodes, of control planes or of workers:
	// JSON patches or strategic merge patches.
	Patches, ControlPlanePatches, WorkerPatches [][]byte
	// Self is the command whose subcommand `host --cluster NAME` calls Host; default this
	// program.
	Self []string
	// CPUs and MemoryMiB are the size of a machine, and the limits of a container; 0: a
	// default size, and no limits.
	CPUs      int
	MemoryMiB int
	DiskGiB   int // of QEMU nodes; negative: no disk
	Disks     int // of that size, in QEMU nodes; 0: one
	// Hardware has the devices of QEMU nodes, in the nodes' order. A node without an entry
	// has virtio devices.
	Hardware []vm.Hardware
	// Unplugged gives QEMU nodes a network card that is connected to nothing.
	Unplugged bool
	// Unconfigured starts QEMU nodes without a configuration. They wait for one from the
	// machine API.
	Unconfigured bool
	// Prepare may change the files of a new node before it starts: in dir, config.yaml, and
	// disk.img (QEMU) or state and var (containers).
	Prepare func(dir string) error
	// Out gets progress messages, in whole lines.
	Out io.Writer
}

// Cluster is an existing cluster.
type Cluster struct {
	Plan
	// Made: this call of Up made the cluster. Started: it did not run before this call.
	// Where neither is set, another command must end the cluster.
	Made, Started bool
	dir           clusterDir
}

// Open returns a cluster. The error is ErrNoCluster where there is none.
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

// List returns all clusters, sorted by name. An error names the damaged ones, and the
// others are returned with it. A cluster that is being removed is left out.
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
			continue // a copy of a directory: no cluster can have this name
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

// Find returns a node by its name, with or without the cluster's name before it.
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

// Dir returns the cluster's directory.
func (c *Cluster) Dir() string { return string(c.dir) }

// Kubeconfig returns the file for kubectl.
func (c *Cluster) Kubeconfig() string { return c.dir.kubeconfig() }

// ClientConfig returns the file for gbctl.
func (c *Cluster) ClientConfig() string { return c.dir.clientConfig() }

// Configuration returns the file with the first configuration of a node.
func (c *Cluster) Configuration(node string) string { return c.dir.config(node) }

// Console returns the file with a node's console.
func (c *Cluster) Console(node string) string { return c.dir.console(node) }

// Status returns the state of all nodes. The error is ErrSilent where the host process is
// starting, stopping, or hangs.
func (c *Cluster) Status(ctx context.Context) ([]NodeStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, statusBudget)
	defer cancel()
	var s []NodeStatus
	return s, ask(ctx, c.dir, http.MethodGet, "/status", &s)
}

// HostPID returns the PID of the cluster's host process, 0 if the cluster is off.
func (c *Cluster) HostPID() (int, error) { return holder(c.dir.lock()) }

// On starts a node that is off.
func (c *Cluster) On(ctx context.Context, node string) error { return c.verb(ctx, node, "on") }

// Off presses a node's power button and waits until the node is off.
func (c *Cluster) Off(ctx context.Context, node string) error { return c.verb(ctx, node, "off") }

// Cut ends a node at once, as a power failure does.
func (c *Cluster) Cut(ctx context.Context, node string) error { return c.verb(ctx, node, "cut") }

// Freeze stops a node's processors.
func (c *Cluster) Freeze(ctx context.Context, node string) error { return c.verb(ctx, node, "freeze") }

// Thaw lets a frozen node run again.
func (c *Cluster) Thaw(ctx context.Context, node string) error { return c.verb(ctx, node, "thaw") }

// Interrupt sends a nonmaskable interrupt to a node.
func (c *Cluster) Interrupt(ctx context.Context, node string) error { return c.verb(ctx, node, "nmi") }

// SetEndpoint turns the cluster's endpoint on or off, where it is a load balancer. The port
// on this machine's loopback stays open in any case.
func (c *Cluster) SetEndpoint(ctx context.Context, on bool) error {
	verb := map[bool]string{true: "on", false: "off"}[on]
	return ask(ctx, c.dir, http.MethodPost, "/endpoint/"+verb, nil)
}

func (c *Cluster) verb(ctx context.Context, node, verb string) error {
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/"+verb, nil)
}

// Up starts a cluster: a new one, or an existing one with its state. A cluster
// that runs and boots the same files keeps running. When Up returns, the nodes
// have started, but Kubernetes may not have. If a new cluster can't be started,
// or ctx ends, nothing remains of it.
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
				// Not with ctx, which may have ended: the cluster must be removed in any
				// case.
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
	if c.Self, err = d.keepProgram(ctx, o.self()); err != nil {
		return nil, err
	}
	if err := writePlan(d, c.Plan); err != nil {
		return nil, err
	}
	err = spawnHost(ctx, d, c.Plan, o)
	if err != nil && ctx.Err() == nil {
		// A command that was killed may have started a host process earlier.
		if running, again := c.awaitHost(ctx); running && again == nil {
			return c, nil
		}
	}
	return c, err
}

// awaitHost turns all nodes on if there is a host process. It may still be starting, also
// after the command that started it has ended.
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

// fits returns an error if an existing cluster differs from the options.
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

// renew updates the plan with the files that the caller boots now, and stops a cluster that
// boots other files.
func renew(ctx context.Context, d clusterDir, plan Plan, o Options) (Plan, error) {
	if err := o.fits(plan); err != nil {
		return plan, err
	}
	next := plan
	next.Kubernetes = o.Kubernetes
	if err := d.keep(ctx, &next, o); err != nil {
		return plan, err
	}
	if next.Source != plan.Source || next.Boot.Cmdline != plan.Boot.Cmdline {
		o.say("The files that cluster %s boots have changed: restarting its nodes.", plan.Name)
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
	// An error means that there is no proc file system. The start of the host process then
	// fails and reports it.
	self, _ := os.Executable()
	return []string{self}
}

// spawnHost starts the host process, which outlives this one, and waits for its last
// report.
func spawnHost(ctx context.Context, d clusterDir, plan Plan, o Options) error {
	log, err := os.OpenFile(d.log(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	reports, reporter, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close()
	args := append(plan.Self[1:len(plan.Self):len(plan.Self)], "host", "--cluster", plan.Name)
	cmd := exec.Command(plan.Self[0], args...)
	cmd.Dir = "/"
	// A relative directory would be another one from /.
	cmd.Env = append(os.Environ(), homeVar+"="+filepath.Dir(filepath.Dir(string(d))))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{reporter} // reportFD
	cmd.SysProcAttr = hostAttributes(os.Geteuid(), os.Getegid(), plan.Provisioner)
	err = cmd.Start()
	reporter.Close()
	if err != nil {
		return fmt.Errorf("start the host process: %w; users other than root need user namespaces for the nodes' network", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }() // otherwise it becomes a zombie
	answer := make(chan report, 1)
	go func() {
		var r report
		decoder := json.NewDecoder(reports)
		for !r.Ready && r.Error == "" {
			r = report{}
			if decoder.Decode(&r) != nil {
				r = report{Error: "the host process ended without a report: " + strings.TrimSpace(ReadLast(d.log(), logTail))}
			}
			if r.Step != "" {
				o.say("%s", r.Step)
			}
		}
		answer <- r
	}()
	reported := false
	select {
	case r := <-answer:
		if r.Ready {
			return nil
		}
		reported, err = true, errors.New(r.Error)
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(plan.readyBudget()):
		err = fmt.Errorf("the host process isn't ready within %s; see %s", plan.readyBudget(), d.log())
	}
	// It either ends by itself or must be ended. Its nodes end with it.
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-exited:
	case <-time.After(failBudget):
		_ = cmd.Process.Kill()
		<-exited
	}
	if !reported {
		reports.Close() // no message must follow
		<-answer
	}
	return err
}

// hostAttributes are for a process in a session of its own. Only root can make networks. So
// the host process of another user is root in a user namespace, without any rights outside
// of it (user_namespaces(7)), and makes its network there. Docker makes networks itself.
func hostAttributes(uid, gid int, provisioner string) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if uid != 0 && provisioner != Docker {
		a.Cloneflags = syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}}
	}
	return a
}
