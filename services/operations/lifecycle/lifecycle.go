// Package lifecycle is how a node goes, and comes back with another system: the operations reboot, shutdown and reset,
// and in system.go install, upgrade and rollback.
//
// Each is a plan of package operation: one list of steps, made of the parts in plan.go. A node that
// others can stand in for is emptied first: no new pods come (cordon), and those that are there end within their
// disruption budgets (drain). A reset then takes the node out of the cluster, out of Kubernetes and out of etcd, and
// has its disk wiped:
//
//	reboot    cordon ─▶ drain ─▶ quorum ─▶ restart ══▶ uncordon ─▶ back
//	shutdown  cordon ─▶ drain ─▶ quorum ─▶ power off ══▶ uncordon, when it is on again
//	reset     cordon ─▶ drain ─▶ stop kubelet ─▶ delete Node ─▶ stop pods ─▶ leave etcd ─▶ mark ─▶ end
//	                                                                                   ╰▶ the disk is wiped
//
// Every step has a deadline. What concerns others only is skipped when its time is up,
// and says so: a node always gets to its end. Only a member of etcd that the cluster
// can't do without is a reason to stay. From the mark on the disk, there is no way
// back: it is wiped when the node ends, or else by the next boot, before anything of
// it is used. What a label covers is in the table boot.Volumes.
package lifecycle

import (
	"context"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/disks"
)

// Names of the operations.
const (
	Reboot   = "reboot"
	Shutdown = "shutdown"
	Reset    = "reset"
)

const (
	// DrainTimeout is how long pods may take to end, unless somebody says otherwise: most
	// end within their default grace of 30 s, and a budget may have to wait for a few of
	// them to be ready elsewhere.
	DrainTimeout = 5 * time.Minute
	// MaxDrainTimeout is for pods with hours of grace.
	MaxDrainTimeout = 24 * time.Hour

	// lookTimeout bounds the question whether others can stand in for this node, and
	// lookBudget how long it is asked again: a node mustn't go without a drain because an
	// API server was about to be replaced.
	lookTimeout = 10 * time.Second
	lookBudget  = 20 * time.Second
	// countTimeout bounds the question whether etcd can do without this node: it may have
	// to look for others to ask. One that is forced only hears what is known soon.
	countTimeout  = 40 * time.Second
	forcedTimeout = 5 * time.Second
	// requestTimeout is less than clients give one request by default, which is 30 s: a
	// configuration may be what a cluster needs that can't be asked.
	requestTimeout = 15 * time.Second
	// changeTimeout bounds a change of the Node. Within it, it is tried again: an API
	// server may be about to be replaced.
	changeTimeout = 30 * time.Second
	changeRetry   = 2 * time.Second
	// endTimeout is how long a node may take to end: its own budgets are shorter.
	endTimeout = 5 * time.Minute
	// holdReboot is how long other nodes wait at most for one that reboots. Servers with
	// much memory test it for minutes before they start anything.
	holdReboot = 15 * time.Minute
	// holdShutdown is how long they wait for one that powers off: until then its etcd may
	// answer who counts its members, and it counts for nothing. A node ends within 30 s.
	holdShutdown = 30 * time.Second
	// backTimeout is how long a node that is back waits for the cluster, which may have
	// been down as a whole. A system that can't reach it goes before: the former one lets pods come again.
	backTimeout = proveTimeout + 5*time.Minute
)

// Etcd is the part of etcd.Etcd that is asked before a member goes, and left.
type Etcd interface {
	MayStop(ctx context.Context, patience time.Duration) error
	MayLeave(ctx context.Context, patience time.Duration) error
	Leave(ctx context.Context) (name string, err error)
	// Settled returns when no Leave is under way.
	Settled(ctx context.Context) error
}

// Options are what the operations stand on.
type Options struct {
	Store *resource.Store
	Etcd  Etcd
	// Lock keeps control planes from disrupting etcd at the same time; nil: nothing does.
	Lock operation.Lock
	// Holds reports whether an operation of this node has the lock.
	Holds func() bool
	// Start and Stop are those of the services.
	Start, Stop func(ctx context.Context, id string) error
	// StopPods ends what runs of Kubernetes on this node.
	StopPods func(ctx context.Context) error
	// UserDisks are the disks of these names, if a reset may wipe them.
	UserDisks func(names []string) ([]disks.UserDisk, error)
	// MarkWipe is that of the disks: the node wipes what is marked when it ends.
	MarkWipe func(labels []string, users []disks.UserDisk, mode string) error
	// MarkEncrypt has the next boot encrypt STATE.
	MarkEncrypt func() error
	// Wiping is the error of a mode of wiping that isn't possible; remarks are what users may not expect of it.
	Wiping func(mode string, labels []string, users []disks.UserDisk) (remarks []string, err error)
	// Power ends the machine. It returns at once.
	Power func(p boot.Power, why string)
	// Systems are the slots; nil in a container. Unhealthy are the services that aren't healthy now.
	Systems   Systems
	Unhealthy func() []string
	// Pull makes an image for pods be there.
	Pull func(ctx context.Context, image string) error

	// Kubernetes makes a client; nil: with what this node has.
	Kubernetes rollout.Kubernetes
}

// Definitions are the operations of this package.
func Definitions(o Options) []operation.Definition {
	// A kubelet may do to its own node and pods what is needed here.
	option.Default[rollout.Kubernetes](&o.Kubernetes, func() (*kubeclient.Client, error) { return controlplane.NodeClient(o.Store, boot.KubeletClient) })
	anytime := func() error { return nil }
	return []operation.Definition{
		o.definition(Reboot, "os:operator", anytime, job.powerSteps),
		o.definition(Shutdown, "os:operator", anytime, job.powerSteps),
		o.definition(Reset, "os:admin", anytime, job.resetSteps),
		// whoever chooses what runs on a node can do all
		o.definition(Install, "os:admin", o.mayInstall, job.systemSteps),
		o.definition(Upgrade, "os:admin", o.mayUpgrade, job.systemSteps),
		o.definition(Rollback, "os:admin", o.mayRollback, job.systemSteps),
	}
}

// onNode is do with a client and this node's name in Kubernetes.
func (o Options) onNode(do func(ctx context.Context, c *kubeclient.Client, name string) error) func(context.Context) error {
	return func(ctx context.Context) error {
		return o.Kubernetes.Node(o.Store, func(c *kubeclient.Client, name string) error { return do(ctx, c, name) })
	}
}

// admin tells whether this node is an administrator of Kubernetes: control planes are.
func (o Options) admin() bool {
	_, err := secrets.Kubernetes.Get(o.Store, secrets.KubernetesID)
	return err == nil
}

// alone says why there is nobody to take this node's pods; "" where somebody can. A
// worker, which may see no other node, is never alone as long as Kubernetes answers.
func (o Options) alone(ctx context.Context, budget time.Duration) (why string) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	var err error
	for range sleep.Every(ctx, changeRetry) {
		if why, err = o.lookAround(ctx); err == nil {
			return why
		}
	}
	return "Kubernetes can't be asked: " + err.Error()
}

// lookAround is one try of alone.
func (o Options) lookAround(ctx context.Context) (why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	why = "no other node is Ready and takes pods"
	err = o.Kubernetes.Node(o.Store, func(c *kubeclient.Client, name string) error {
		if !o.admin() {
			why = ""
			_, err := c.Get(ctx, kubeclient.NodeRef(name))
			return err
		}
		nodes, err := c.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Node"}, kubeclient.Selection{})
		if slices.ContainsFunc(nodes.Items(), func(n kubeclient.Object) bool {
			return n.Name() != name && n.Condition("Ready") && n.At("spec", "unschedulable") != true
		}) {
			why = ""
		}
		return err
	})
	return why, err
}
