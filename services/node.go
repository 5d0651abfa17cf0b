// Package services lists what a node runs. The two tables in this file are the
// machine: its services with what each depends on, and its controllers. The
// packages below hold one service or one group of controllers each, and the
// generic ones (dag, resource, operation, process, logs) that know none of them by name.
package services

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/trustd"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/operations/doctor"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/sysctl"
	"github.com/garboard-os/garboard/services/system/udev"
)

// dependencies has every service of a node, and the services that must be up before it
// starts; it stops before they do. A certificate, or another fact that a service needs, is
// in its package.
var dependencies = map[string][]string{
	udev.ID:       nil,
	apid.ID:       {udev.ID},
	network.ID:    {udev.ID},
	machine.ID:    {udev.ID},
	disks.ID:      {machine.ID},
	files.ID:      {disks.ID},
	clock.ID:      {disks.ID, network.ID},
	balancer.ID:   {disks.ID, network.ID},
	trustd.ID:     {network.ID, clock.ID},
	containerd.ID: {disks.ID, files.ID},
	etcd.ID:       {containerd.ID, network.ID, clock.ID},
	kubelet.ID:    {containerd.ID, network.ID, clock.ID, balancer.ID},
	vip.ID:        {network.ID, etcd.ID},
}

// purposes has every controller of a node, and what it does.
var purposes = map[string]string{
	"config.MachineTypeController":            "the node's part in its cluster",
	"config.KubernetesControlPlaneController": "the control plane's configuration, out of the machine's",
	"v1alpha1.TimeStatusController":           "a line in the log when the time becomes synchronised, or stops being so",
	"v1alpha1.BootstrapStatusController":      "whether the control plane is self-hosted: it isn't",
	"runtime.SysctlController":                "kernel parameters",
	"secrets.APIController":                   "the machine API's certificate",
	"secrets.EtcdController":                  "etcd's certificates",
	"secrets.KubernetesController":            "certificates and keys of the control plane and of the kubelet",
	"secrets.FilesController":                 "the files with the secrets",
	"k8s.ControlPlaneStaticPodController":     "the control plane's static pods",
	"k8s.KubeletStaticPodController":          "the static pods' files for the kubelet, and their status from it",
	"k8s.ManifestController":                  "the bootstrap manifests: what a new cluster gets first",
	"k8s.ManifestApplyController":             "the objects of bootstrap manifests that the cluster lacks",
	"k8s.ManifestDriftController":             "how the cluster's objects differ from the bootstrap manifests",
	"k8s.NodeLabelController":                 "labels and taints of the node",
	"k8s.NodeLeaveController":                 "the end of the Nodes of workers that are reset",
	"k8s.ServingApprovalController":           "the approval of the certificates that workers' kubelets serve with",
	"k8s.CNIConfigController":                 "how containerd connects pods",
}

// paramChart as a kernel parameter names a device, such as /dev/ttyS1, that gets
// the boot chart as SVG: for machines that are only watched from outside.
const paramChart = "garboard.chart"

// Options are what PID 1 gives its node.
type Options struct {
	Mode      boot.Mode
	Cmdline   boot.Cmdline
	Processes *process.Table
	Logs      *logs.Logs
	// Power ends the machine. It returns at once.
	Power func(p boot.Power, why string)
}

// Node is the services, the resources and the controllers of one machine.
type Node struct {
	Store   *resource.Store
	graph   *dag.Graph
	runtime *resource.Runtime
	ops     *operation.Runner
	api     *api.Server
	disks   *disks.Disks
	report  reporter
	logs    *logs.Logs
}

// NewNode puts the node together; nothing runs yet. An error here is a defect
// of the tables below, and a test finds it first.
func NewNode(o Options) (*Node, error) {
	store := resource.NewStore()
	n := &Node{Store: store, logs: o.Logs}
	applier := machine.NewApplier(machine.ApplierOptions{
		Mode: o.Mode, Store: store, Log: o.Logs.Logger(machine.ID),
		Restart: func(ctx context.Context, id string) error { return n.graph.Restart(ctx, id) },
		Reboot:  func(why string) { o.Power(boot.Reboot, why) },
	})
	d := disks.New(disks.Options{Mode: o.Mode, Store: store, Processes: o.Processes, Logs: o.Logs, Plugins: boot.CNIBinDir, StateReady: func() error {
		if err := applier.StateReady(); err != nil {
			return err
		}
		n.ops.Open()
		return nil
	}})
	n.disks = d
	ctrd := containerd.New(containerd.Options{Mode: o.Mode, Store: store, Processes: o.Processes, Logs: o.Logs})

	member := etcd.New(etcd.Options{
		Mode: o.Mode, Store: store, Containerd: ctrd, Peers: peers.New(store), Log: o.Logs.Logger(etcd.ID),
		Stop:    func(ctx context.Context) error { return n.graph.Stop(ctx, etcd.ID) },
		Running: func(names ...string) (string, error) { return n.ops.Running(names...) }, LeaveWith: []string{lifecycle.Reset},
	})

	var err error
	ends := lifecycle.Options{
		Store: store, Etcd: member, StopPods: ctrd.StopPods, MarkWipe: d.MarkWipe, Power: o.Power,
		Start: func(ctx context.Context, id string) error { return n.graph.Start(ctx, id) },
		Stop:  func(ctx context.Context, id string) error { return n.graph.Stop(ctx, id) },
	}
	n.ops, err = operation.New(operation.Options{
		Store: store, Log: o.Logs.Quiet(operation.ID), Say: o.Logs.Printf, Dir: boot.OperationsDir, Lock: member.Lock(), Shared: member.Shared(),
		Definitions: slices.Concat(lifecycle.Definitions(ends), member.Definitions()),
	})
	if err != nil {
		return nil, fmt.Errorf("operations: %w", err)
	}

	since := dag.SinceBoot
	if o.Mode == boot.Container {
		// A container has no kernel of its own: its boot began with PID 1.
		began := time.Now()
		since = func() time.Duration { return time.Since(began) }
	}
	services := []dag.Service{
		udev.Service(udev.Options{Mode: o.Mode, Logs: o.Logs}),
		apid.Service(apid.Options{Store: store, Logs: o.Logs, Processes: o.Processes, Cmdline: o.Cmdline}),
		network.New(network.Options{Mode: o.Mode, Store: store, Logs: o.Logs}).Service(),
		machine.Service(machine.Options{
			Store: store, Applier: applier, MountState: d.MountState,
			Sources: boot.Sources(boot.SourceOptions{Mode: o.Mode, Cmdline: o.Cmdline, Mount: d.Volume}),
		}),
		d.Service(),
		files.New(files.Options{Store: store, Logs: o.Logs}).Service(),
		balancer.Service(balancer.Options{Store: store}),
		clock.New(clock.Options{Mode: o.Mode, Store: store, Logs: o.Logs}).Service(),
		ctrd.Service(),
		trustd.Service(trustd.Options{Store: store, Logs: o.Logs, Processes: o.Processes}),
		member.Service(),
		kubelet.Service(kubelet.Options{Mode: o.Mode, Store: store, Containerd: ctrd}),
		vip.Service(vip.Options{Store: store}),
	}
	for i, s := range services {
		services[i].DependsOn = dependencies[s.ID]
	}
	n.graph, err = dag.New(dag.Options{Log: o.Logs.Logger, Story: o.Logs.Quiet, SinceBoot: since}, services...)
	if err != nil {
		return nil, fmt.Errorf("service graph: %w", err)
	}
	controllers := slices.Concat(
		[]resource.Controller{machine.TypeController(), clock.StatusController(), sysctl.Controller(sysctl.Options{Mode: o.Mode})},
		secrets.Controllers(secrets.Options{}),
		controlplane.Controllers(controlplane.Options{Logs: o.Logs}),
	)
	n.runtime, err = resource.NewRuntime(store, o.Logs.Logger("controller-runtime"), controllers...)
	if err != nil {
		return nil, fmt.Errorf("controllers: %w", err)
	}
	doctor := doctor.New(doctor.Options{
		Mode: o.Mode, Store: store, Statuses: n.graph.Statuses, Events: n.graph.Events, Tail: o.Logs.Tail,
		Configuration: applier, SinceBoot: since,
	})
	n.api, err = api.New(api.Options{
		Mode: o.Mode, Store: store, Graph: n.graph, Runtime: n.runtime, Logs: o.Logs, Config: applier, Containerd: ctrd,
		Processes: o.Processes, Since: since, Disks: d.List, UserDisks: d.UserDisks,
		Diagnose: doctor.Diagnose, Etcd: member, Operations: n.ops, MayReboot: ends.MayReboot,
	})
	if err != nil {
		return nil, err
	}
	chartTo, _ := o.Cmdline.Get(paramChart)
	n.report = reporter{graph: n.graph, store: store, logs: o.Logs, chartTo: chartTo, since: since}
	return n, nil
}

// Run runs the node until ctx is cancelled and everything has stopped, services
// in reverse order of their dependencies.
func (n *Node) Run(ctx context.Context) error {
	// The controllers go on while services stop: a service may still want what
	// they make. They end last.
	rctx, stopControllers := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := n.runtime.Run(rctx); err != nil && rctx.Err() == nil {
			n.logs.Logger("controller-runtime").Error("controllers ended", slog.Any("err", err))
		}
	})
	wg.Go(func() {
		if err := n.api.Run(rctx); err != nil {
			n.logs.Logger(api.LogID).Error("the machine API ended", slog.Any("err", err))
		}
	})
	wg.Go(func() {
		// With the first service that stops: what runs goes on after the next boot.
		if err := n.ops.Run(ctx); err != nil {
			n.logs.Logger(operation.ID).Warn(err.Error())
		}
	})
	events := n.graph.Subscribe(rctx)
	wg.Go(func() { n.report.run(rctx, events) })
	err := n.graph.Run(ctx)
	stopControllers()
	wg.Wait()
	return err
}

// End ends the machine as `gbctl reboot` and `gbctl shutdown` do, for somebody at the machine
// or its host: within lifecycle.PressBudget its services stop. It returns once that is under
// way; an error means that it isn't.
func (n *Node) End(ctx context.Context, p boot.Power, why string) error {
	name := map[boot.Power]string{boot.Reboot: lifecycle.Reboot, boot.PowerOff: lifecycle.Shutdown}[p]
	_, err := n.ops.Start(ctx, operation.Ask{Name: name, Arguments: lifecycle.Pressed().Encode(), By: why})
	return err
}

// Marked tells whether a reset has marked anything that Erase wipes once all has stopped.
func (n *Node) Marked() bool { return n.disks.Marked() }

// Erase is that of the disks.
func (n *Node) Erase(ctx context.Context) error { return n.disks.Erase(ctx) }
