// Package kubelet runs the kubelet: an OCI image in containerd's system
// namespace, with the node's namespaces and the mounts that pods' volumes must
// reach through.
//
// It starts as soon as network and containerd are there, on every node, and keeps trying until the control plane
// answers. A control plane's has a certificate that the node has made with the cluster's authority; the one of a
// worker's comes from the cluster, which the node asks with the bootstrap token (join.go), before the kubelet starts.
// It talks to the node's load balancer of the API, and is started anew when the node has another address, and when
// static pods change before it knows from Kubernetes which pods there should be: it would replace none of them.
package kubelet

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/volumes"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const (
	// ID of the service and its container.
	ID = "kubelet"

	healthURL     = "http://127.0.0.1:10248/healthz"
	healthPeriod  = time.Second
	healthTimeout = 5 * time.Second
	// stopBudget: the kubelet has nothing to save; pods go on without it.
	stopBudget = 10 * time.Second
)

// Options are what the service stands on.
type Options struct {
	Mode       boot.Mode
	Store      *resource.Store
	Containerd *containerd.Containerd
}

// Service is the kubelet in the graph.
func Service(o Options) dag.Service {
	runner := &containerd.Runner{
		Containerd: o.Containerd,
		ID:         ID,
		Image:      func(c *config.Config) string { return c.Machine.Kubelet.Image },
		Field:      "machine.kubelet.image",
		Spec:       o.spec,
		StopBudget: stopBudget,
	}
	node := &registration{}
	return dag.Service{
		ID:   ID,
		Kind: dag.Container,
		Needs: []dag.Condition{
			secrets.Statuses.When(o.Store, secrets.KubeletID, "kubelet credentials to be made", func(secrets.StatusSpec) bool { return true }),
			volumes.Mounted(o.Store), // pods would write below the mount points otherwise
		},
		Lacks: runner.Lacks,
		Prepare: func(ctx context.Context, h *dag.Handle) error {
			if err := o.awaitIdentity(ctx); err != nil {
				return err
			}
			if err := o.join(ctx, h); err != nil {
				return err
			}
			if err := o.pullPause(ctx, h); err != nil {
				return err
			}
			return runner.Prepare(ctx, h)
		},
		Run: func(ctx context.Context, h *dag.Handle) error {
			return whileAddressed(ctx, o.Store, func(ctx context.Context) error {
				isReady := func(s resource.Object[balancer.APIServer]) bool { return s.Spec.Ready }
				ready := func() bool { return slices.ContainsFunc(balancer.APIServers.List(o.Store), isReady) }
				run := func(ctx context.Context) error {
					return restartForStaticPods(ctx, boot.StaticPodsDir, ready, h.Event, func(ctx context.Context) error { return runner.Run(ctx, h) })
				}
				renew := func(ctx context.Context) error { return o.renew(ctx, h) }
				return dag.While(ctx, run, renew, func(ctx context.Context) error { return node.watch(ctx, o.Store) })
			})
		},
		Health: &dag.Health{Period: healthPeriod, Timeout: healthTimeout, Check: runner.Proves(func(ctx context.Context) error {
			return cmp.Or(dag.HTTPCheck(healthURL)(ctx), node.healthy())
		})},
		Restart:    dag.RestartAlways,
		StopBudget: stopBudget + 5*time.Second,
	}
}

// pullPause pulls the image of pods' sandboxes if a rule for pods' images is for it: containerd pulls it itself
// otherwise, and verifies nothing.
func (o Options) pullPause(ctx context.Context, h *dag.Handle) error {
	cfg, err := configuration.Config(o.Store)
	if err != nil {
		return err
	}
	if rule := cfg.Machine.Images.Rule(config.DefaultPauseImage); rule == nil || !rule.Pods {
		return nil
	}
	_, err = o.Containerd.Pull(ctx, containerd.PodNamespace, config.DefaultPauseImage, h.EventOf)
	return err
}

// directories the mounts below need on the node, with their modes.
var directories = []struct {
	path string
	mode os.FileMode
}{
	{boot.KubeletDir, 0o700},
	{boot.KubeletDir + "/pki", 0o700},
	{boot.LogDir + "/pods", 0o755},
	{boot.LogDir + "/containers", 0o755},
	{boot.StaticPodsDir, 0o755},
	{boot.CNIConfDir, 0o755},
}

// mounts is what the kubelet sees of the node. Those that pods' volumes are
// mounted under are shared, so that containerd sees them too.
//
// Of what pods may write to it sees all: whether a directory of a hostPath volume is
// there it checks itself, and a part of a volume (subPath) it makes and mounts itself,
// in its own file system if that doesn't show the node's. What it mounts there itself,
// and an extra mount that covers a part of it, stays its own.
var mounts = slices.Concat(
	// The node's own, not a fresh one: in a container node, settings of the host
	// are covered there.
	bind("rbind rw nosuid noexec nodev", "/proc"),
	bind("rbind rshared rw nosuid", "/dev"),
	bind("rbind rshared rw", "/sys", "/run"),
	bind("rbind rslave rw", boot.EphemeralDir),
	bind("rbind rshared rw", boot.KubeletDir, boot.ContainerdDir),
	bind("rbind ro", "/etc/kubernetes", secretsDir),
	bind("bind ro", "/etc/machine-id", "/etc/os-release", "/etc/resolv.conf", boot.PodResolvConf, "/etc/hosts", "/etc/hostname", "/etc/localtime",
		"/etc/timezone"),
	bind("rbind rslave rw", boot.CNIConfDir),
	[]specs.Mount{
		{Type: "bind", Source: boot.CABundle, Destination: "/etc/ssl/certs/ca-certificates.crt", Options: []string{"bind", "ro"}},
		{Type: "bind", Source: "/usr/lib/modules", Destination: "/lib/modules", Options: []string{"rbind", "ro"}},
	},
)

// bind has paths at the same place as on the node.
func bind(options string, paths ...string) []specs.Mount {
	return lists.Of(paths, func(path string) specs.Mount {
		return specs.Mount{Type: "bind", Source: path, Destination: path, Options: strings.Fields(options)}
	})
}

// hostPaths are places that charts mount, as pods see them.
var hostPaths = bind("rbind rslave rw", lists.Of(boot.HostPaths, func(p boot.HostPath) string { return p.Path })...)

// extraMounts are those of the configuration. What is mounted below them later,
// on the node or by the kubelet, is seen on both sides, as storage drivers want it.
func extraMounts(c *config.Config) (out []specs.Mount) {
	for _, v := range c.Machine.Kubelet.ExtraMounts {
		access := "rw"
		if v.ReadOnly {
			access = "ro"
		}
		out = append(out, specs.Mount{Type: "bind", Source: v.HostPath, Destination: v.MountPath, Options: []string{"rbind", "rshared", access}})
	}
	return out
}

func (o Options) spec(context.Context) ([]oci.SpecOpts, error) {
	cfg, err := configuration.Config(o.Store)
	addr, none := network.Addresses.Get(o.Store, network.AddressID)
	name, unnamed := network.Hostnames.Get(o.Store, network.HostnameID)
	if err = cmp.Or(err, none, unnamed); err != nil {
		return nil, err
	}
	args := commandLine(cfg, name.Spec, cfg.Cluster.Network.NodeIPs(addr.Spec.Primary, addr.Spec.All))
	return []oci.SpecOpts{
		oci.WithProcessArgs(args...),
		oci.WithPrivileged,
		oci.WithAllDevicesAllowed,
		oci.WithHostNamespace(specs.NetworkNamespace),
		oci.WithHostNamespace(specs.PIDNamespace),
		oci.WithHostNamespace(specs.IPCNamespace),
		oci.WithHostNamespace(specs.UTSNamespace),
		oci.WithHostNamespace(specs.CgroupNamespace),
		oci.WithCgroup(boot.SystemCgroup + "/kubelet"),
		oci.WithoutMounts("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/run"),
		oci.WithMounts(slices.Concat(mounts, hostPaths, extraMounts(cfg))),
		withSharedMounts,
		oci.WithMaskedPaths(nil),
		oci.WithReadonlyPaths(nil),
	}, nil
}

// withSharedMounts keeps the propagation of the mounts above: runc makes all
// mounts of a container private otherwise.
func withSharedMounts(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	s.Linux.RootfsPropagation = "rshared"
	return nil
}
