package services

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/trustd"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/extension"
	"github.com/garboard-os/garboard/services/kubernetes/firewall"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/operations/convertk8s"
	"github.com/garboard-os/garboard/services/operations/doctor"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/operations/readdress"
	"github.com/garboard-os/garboard/services/operations/reendpoint"
	"github.com/garboard-os/garboard/services/operations/rotateca"
	"github.com/garboard-os/garboard/services/operations/upgradek8s"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/logship"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/services/system/sysctl"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/udev"
	"github.com/garboard-os/garboard/services/system/volumes"
)

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
	network *network.Daemon
	slots   *slots.Slots
	forward *logship.Forwarder
	report  reporter
	doctor  *doctor.Doctor
	// fingerprint is on the console.
	fingerprint apid.Fingerprint
	power       func(p boot.Power, why string)
	logs        *logs.Logs
}

// NewNode puts the node together; nothing runs yet. An error here is a defect
// of the tables in node.go, and a test finds it first.
func NewNode(o Options) (*Node, error) {
	store := resource.NewStore()
	n := &Node{Store: store, logs: o.Logs, power: o.Power}
	var argument config.Network
	if text, given := o.Cmdline.Get(network.ParamIP); given && o.Mode == boot.Machine {
		settings, err := network.FromArgument(text)
		if err != nil {
			o.Logs.Logger(network.ID).Warn(fmt.Sprintf("the kernel parameter ip=%s isn't used: %v", text, err))
		} else {
			argument = settings
		}
	} else if seed, err := os.ReadFile(boot.SeedConfigFile); err == nil && o.Mode == boot.Container {
		// A node that was reset doesn't use its seed again (boot.ResetFile), but for its network: it has no other one,
		// and is to get a configuration.
		if c, _, err := config.Load(boot.SeedConfigFile, seed); err == nil {
			argument = c.Machine.Network
		}
	}
	n.network = network.New(network.Options{Store: store, Argument: argument, Platform: func(ctx context.Context, needed func()) ([]byte, error) {
		return source.PlatformNetwork(ctx, source.Options{Mode: o.Mode, Cmdline: o.Cmdline, Mount: n.disks.Volume, Wait: func(ctx context.Context, d time.Duration) error {
			if needed(); !sleep.For(ctx, d) {
				return context.Cause(ctx)
			}
			return nil
		}})
	}})
	_, installed := o.Cmdline.Get(boot.ParamSlot)
	unable := firewall.Unable
	var place func(config.Install) (string, error) // nil in a container
	if o.Mode == boot.Machine {
		unable = func(c *config.Config) string {
			return strings.Join(slices.DeleteFunc([]string{firewall.Unable(c), n.disks.Unable(c)}, func(s string) bool { return s == "" }), "; ")
		}
		place = func(install config.Install) (string, error) { return n.disks.Place(install) }
	}
	var ends lifecycle.Options
	applier := configuration.NewApplier(configuration.ApplierOptions{
		Mode: o.Mode, Trial: o.Cmdline.Fallback(), Back: o.Cmdline.Back(), Store: store, Log: o.Logs.Logger(configuration.ID),
		Restart: func(ctx context.Context, id string, late bool) error {
			restart := func() error { return n.graph.Restart(ctx, id) }
			// the members were counted when it was to restart
			if late && id == etcd.ID && n.graph.Lacks(ctx, id) == nil {
				_, err := ends.Interrupt(ctx, "restart of etcd", false, restart)
				return err
			}
			return restart()
		},
		Reboot: func(why string) { o.Power(boot.Reboot, why) },
		Place:  place,
		Unable: unable,
		HasWay: func(next config.Network) bool { return network.HasWay(store, next) },
	})
	// What the kernel has stored is read once, because the reporter removes it.
	panicked := sync.OnceValue(func() string { _, why, _ := logs.Crash(boot.PstoreDir); return why })
	d := disks.New(disks.Options{Mode: o.Mode, Installed: installed, Store: store, Processes: o.Processes, Logs: o.Logs, Plugins: boot.CNIPlugins, TPM: tpm.New(boot.SignaturesDir), Sound: func(ctx context.Context) error { return n.slots.Sound(ctx) }, Network: func(ctx context.Context, settings *config.Network) error {
		if settings != nil {
			n.network.Use(*settings)
		}
		return applier.NeedNetwork(ctx, 0)
	}, StateReady: func() error {
		if err := applier.StateReady(); err != nil {
			return err
		}
		if err := applier.RecordBoot(n.slots.Running(), panicked()); err != nil {
			o.Logs.Logger(configuration.ID).Error("this boot isn't recorded", "err", err)
		}
		n.ops.Open()
		return nil
	}})
	n.disks = d
	var media boot.Mounter // nil in a container: the host's media aren't the node's
	if o.Mode == boot.Machine {
		media = d.Media
	}
	ctrd := containerd.New(containerd.Options{Mode: o.Mode, Store: store, Processes: o.Processes, Logs: o.Logs, Volume: media, Devices: d.Devices})

	others := peers.New(store)
	member := etcd.New(etcd.Options{
		Store: store, Containerd: ctrd, Peers: others, Log: o.Logs.Logger(etcd.ID),
		Stop:    func(ctx context.Context) error { return n.graph.Stop(ctx, etcd.ID) },
		Running: func(names ...string) (string, error) { return n.ops.Running(names...) }, LeaveWith: []string{lifecycle.Reset},
	})

	n.slots = slots.New(slots.Options{Cmdline: o.Cmdline, Store: store, Disks: d, Images: ctrd, Panicked: panicked, Processes: o.Processes, Log: o.Logs.Logger(slots.ID)})
	var systems lifecycle.Systems // nil in a container
	if o.Mode == boot.Machine {
		systems = n.slots
	}
	var err error
	ends = lifecycle.Options{
		Store: store, Etcd: member, Lock: member.Lock(), StopPods: ctrd.StopPods, UserDisks: d.UserDisks, MarkWipe: d.MarkWipe, MarkEncrypt: d.MarkEncrypt, Wiping: d.Wiping,
		Power: o.Power, Systems: systems, Unhealthy: n.unhealthy, Holds: func() bool { return n.ops.Holds() },
		Pull: func(ctx context.Context, image string) error {
			_, err := ctrd.PullWithProgress(ctx, containerd.PodNamespace, image, false, func(_, _ int64) error { return nil })
			return err
		},
		Start: func(ctx context.Context, id string) error { return n.graph.Start(ctx, id) },
		Stop:  func(ctx context.Context, id string) error { return n.graph.Stop(ctx, id) },
	}
	upgrade := upgradek8s.Options{
		Store: store, Peers: others,
		Kubernetes: func() (*kubeclient.Client, error) { return controlplane.AdminClient(store) },
		Metrics: func(ctx context.Context, node netip.Addr) (string, error) {
			return controlplane.Metrics(ctx, store, node)
		},
	}
	convert := convertk8s.Options{
		Store: store, Peers: others, Kubernetes: upgrade.Kubernetes,
		RemoveInitialized: func(ctx context.Context) error { return controlplane.RemoveInitialized(ctx, store) },
	}
	rotate := rotateca.Options{
		Store: store, Peers: others, Kubernetes: upgrade.Kubernetes, IssuedBy: rotateca.IssuedBy,
		AcceptedBy: map[string]func(context.Context, netip.Addr, config.CertKey) error{
			config.MachineAuthority: others.AcceptedBy,
			config.KubernetesAuthority: func(ctx context.Context, node netip.Addr, ca config.CertKey) error {
				return controlplane.AcceptedBy(ctx, store, node, ca)
			},
			config.EtcdAuthority: func(ctx context.Context, node netip.Addr, ca config.CertKey) error {
				return etcd.AcceptedBy(ctx, store, node, ca)
			},
		},
	}
	move := readdress.Options{Store: store, Configuration: applier, Etcd: member, Peers: others, Kubernetes: upgrade.Kubernetes}
	lead := reendpoint.Options{
		Peers: others, Kubernetes: upgrade.Kubernetes,
		Record: func(ctx context.Context, endpoint string) error {
			return controlplane.RecordIssuer(ctx, store, endpoint)
		},
		ServesAt: func(ctx context.Context, url, name string) error { return controlplane.ServesAt(ctx, store, url, name) },
	}
	n.ops, err = operation.New(operation.Options{
		Store: store, Log: o.Logs.Quiet(operation.ID), Print: o.Logs.Printf, Dir: boot.OperationsDir, Lock: member.Lock(), Shared: member.Shared(),
		Definitions: slices.Concat(lifecycle.Definitions(ends), member.Definitions(), []operation.Definition{upgradek8s.Definition(upgrade), convertk8s.Definition(convert), rotateca.Definition(rotate), readdress.Definition(move), reendpoint.Definition(lead)}),
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
	gate := sandbox.NewSocket(apid.UID, "")
	timed := clock.New(clock.Options{Mode: o.Mode, Store: store})
	services := []dag.Service{
		udev.Service(udev.Options{Mode: o.Mode, Store: store}),
		apid.Service(apid.Options{Store: store, Logs: o.Logs, Processes: o.Processes, Cmdline: o.Cmdline, Socket: gate, Fingerprint: &n.fingerprint}),
		n.network.Service(),
		configuration.Service(configuration.Options{
			Store: store, Applier: applier, MountState: d.MountState, Installed: installed, Unlocked: d.Unlocked,
			Sources: source.All(source.Options{Mode: o.Mode, Cmdline: o.Cmdline, Mount: d.Volume, Wait: applier.NeedNetwork}),
		}),
		d.Service(),
		slots.Service(slots.ServiceOptions{Mode: o.Mode, Slots: n.slots, Install: n.install}),
		files.New(files.Options{Store: store, Logs: o.Logs}).Service(),
		balancer.Service(balancer.Options{Store: store}),
		resolver.Service(store),
		timed.Service(),
		ctrd.Service(),
		trustd.Service(trustd.Options{Store: store, Logs: o.Logs, Processes: o.Processes, Roster: member.Roster, Enlist: member.Enlist}),
		member.Service(),
		kubelet.Service(kubelet.Options{Mode: o.Mode, Store: store, Containerd: ctrd}),
		vip.Service(vip.Options{Store: store}),
	}
	for i, s := range services {
		services[i].DependsOn = dependencies[s.ID]
	}
	services = append(services, extension.Services(extension.Options{Store: store, Containerd: ctrd, Log: o.Logs.Logger(extension.ID)})...)
	n.graph, err = dag.New(dag.Options{Log: o.Logs.Logger, EventLog: o.Logs.Quiet, SinceBoot: since}, services...)
	if err != nil {
		return nil, fmt.Errorf("service graph: %w", err)
	}
	controllers := slices.Concat(
		[]resource.Controller{configuration.TypeController(), clock.StatusController(), firewall.Controller(), firewall.PolicyController(), udev.ModuleController(udev.Options{Mode: o.Mode}), (&volumes.Volumes{Mode: o.Mode, Keeper: d.Keeper, Media: d.Finder, System: d.Shown, KeysOf: d.KeysOf}).Controller(), kubelet.HealthController(since)},
		sysctl.Controllers(o.Mode),
		secrets.Controllers(secrets.Options{}),
		controlplane.Controllers(controlplane.Options{
			Logs: o.Logs, Roster: member.Roster, Enlist: member.Enlist, Kill: ctrd.Kill,
			Have: func(ctx context.Context, image, instead string) error {
				return ctrd.Have(ctx, containerd.PodNamespace, image, instead)
			},
		}),
	)
	n.runtime, err = resource.NewRuntime(store, o.Logs.Logger("controller-runtime"), controllers...)
	if err != nil {
		return nil, fmt.Errorf("controllers: %w", err)
	}
	locked := ends
	locked.Lock = nil
	n.doctor = doctor.New(doctor.Options{
		Mode: o.Mode, Store: store, Statuses: n.graph.Statuses, Events: n.graph.Events, Tail: o.Logs.Tail,
		Configuration: applier, SinceBoot: since,
	})
	n.api, err = api.New(api.Options{
		Mode: o.Mode, Store: store, Graph: n.graph, Runtime: n.runtime, Logs: o.Logs, Config: applier, Containerd: ctrd, Gate: gate,
		Since: since, Disks: d.List, Recovery: d, SetTime: timed.Set,
		Diagnose: n.doctor.Diagnose, Etcd: member, Roster: member.Roster, EnlistToken: member.EnlistToken, Enlist: member.Enlist, Operations: n.ops, Interrupt: ends.Interrupt, Reboot: ends.Reboot, InterruptLocked: locked.Interrupt, KubernetesVersion: upgrade.From,
	})
	if err != nil {
		return nil, err
	}
	n.forward = logship.New(logship.Options{Store: store, Logs: o.Logs, AuditLog: controlplane.AuditLog})
	chartTo, _ := o.Cmdline.Get(paramChart)
	n.report = reporter{mode: o.Mode, graph: n.graph, store: store, logs: o.Logs, chartTo: chartTo, since: since}
	return n, nil
}
