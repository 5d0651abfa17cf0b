package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
	"gopkg.in/yaml.v3"
)

const clusterLong = `cluster runs development clusters on this machine: nodes as virtual machines in
QEMU, or as containers, which are as fast as the machine itself.

All of a cluster is in ~/.garboard/clusters/NAME ($GARBOARD_HOME/clusters/NAME), and in
one process that holds all that lives. Nodes reach each other, the images that were built
and the mirrors that were named, and nothing else.`

func (a *app) clusterCommand() *cobra.Command {
	cmd := group(&cobra.Command{
		Use:   "cluster",
		Short: "Run development clusters on this machine",
		Long:  clusterLong,
	})
	cmd.AddCommand(a.clusterCreateCommand(), a.clusterDestroyCommand(), a.clusterShowCommand(), a.clusterDebugCommand(),
		clusterHostCommand())
	return cmd
}

func nameFlag(cmd *cobra.Command, name *string) *cobra.Command {
	cmd.Flags().StringVar(name, "name", devcluster.DefaultName, "name of the cluster")
	return cmd
}

const clusterCreateLong = `Create a cluster, or bring one that exists up again, and wait until it serves.

What nodes boot is built from a checkout of Garboard where it isn't yet; --source says
where that is, unless the command is started in it.

Access to the cluster is merged into the client configuration and into the kubeconfig,
as the current context of both, and taken out again by 'gbctl cluster destroy'.

Flags that say what nodes are like are for new clusters; one that exists stays as it is.

If it is interrupted or can't start, nothing of a new cluster remains. One that starts
and doesn't serve in time stays, to be looked into.`

// createFlags are what cluster create is told.
type createFlags struct {
	cluster devcluster.Options
	source  string
	cidr    string
	merge   bool
	mirrors []string

	wireguard string

	patches, controlPlanePatches, workerPatches []string
}

// S-330, S-331, S-332
func (a *app) clusterCreateCommand() *cobra.Command {
	var o createFlags
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a cluster and wait until it serves",
		Long:  clusterCreateLong,
		Example: `  gbctl cluster create
  gbctl cluster create --name three --controlplanes 3 --workers 1
  gbctl cluster create --provisioner qemu --workers 1 --registry-mirror '*=http://127.0.0.1:5000'
  gbctl cluster create --config-patch '{machine: {sysctls: {kernel.pid_max: "100000"}}}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			options, err := o.options(cmd.Flags().Changed("workers"))
			if err != nil {
				return err
			}
			return a.clusterCreate(cmd.Context(), options, o.merge)
		},
	}
	o.flags(cmd)
	return cmd
}

// flags are those of cluster create.
func (o *createFlags) flags(cmd *cobra.Command) {
	q := &o.cluster.Cluster
	f := nameFlag(cmd, &q.Name).Flags()
	f.IntVar(&q.ControlPlanes, "controlplanes", 0, "how many control planes, 1 or more; an odd number survives most (default 1; without --workers, too, as many as there are)")
	f.IntVar(&q.Workers, "workers", 0, "how many workers, 0 or more (default none; without --controlplanes, too, as many as there are)")
	f.StringVar(&q.Provisioner, "provisioner", qemu.Auto, "how nodes run: qemu, container, or auto: QEMU where KVM really runs a guest, else containers")
	f.StringVar(&o.cidr, "cidr", "", "IPv4 network of the nodes (default 10.5.0.0/24); this machine has its first address, as gateway")
	f.StringVar(&o.wireguard, "wireguard-cidr", "", "IPv4 network of a virtual private network between the nodes, such as 10.1.0.0/24 (default none)")
	f.StringArrayVar(&o.mirrors, "registry-mirror", nil, "HOST=URL: nodes ask URL, through this machine, instead of the registry HOST; '*' is any; repeatable")
	f.StringVar(&q.KubernetesVersion, "kubernetes-version", "", "another Kubernetes than what is built (default "+config.KubernetesVersion+"), from a registry mirror")
	f.StringVar(&q.InstallImage, "install-image", "", "image of the installer, for machine.install.image (default none)")
	f.IntVar(&q.CPUs, "cpus", 0, "processors of each node (default 2 in QEMU, as many as there are in a container)")
	f.IntVar(&q.MemoryMiB, "memory", 0, "MiB of memory of each node; a control plane needs 2048, a worker 1024 (default 4096 in QEMU, as much as there is in a container)")
	f.IntVar(&q.DiskGiB, "disk", 0, "GiB of the disk of each node in QEMU; takes room only as it fills (default 20)")
	f.StringArrayVar(&o.patches, "config-patch", nil, "patch for all nodes, or @FILE; repeatable")
	f.StringArrayVar(&o.controlPlanePatches, "config-patch-control-plane", nil, "patch for control planes, or @FILE; repeatable")
	f.StringArrayVar(&o.workerPatches, "config-patch-worker", nil, "patch for workers, or @FILE; repeatable")
	f.DurationVar(&o.cluster.Wait, "wait-timeout", 0, "how long it may take to serve, from power-on, such as 90s or 10m (default "+devcluster.ReadyBudgets+")")
	f.StringVar(&o.source, "source", ".", "checkout of Garboard to build from, or a folder in it")
	f.BoolVar(&o.merge, "merge", true, "merge access into the client configuration and the kubeconfig")
}

// notNegative are the numbers of which 0 is the default.
func (o *createFlags) notNegative() error {
	q := o.cluster.Cluster
	for _, f := range []struct {
		name   string
		number int64
	}{
		{"controlplanes", int64(q.ControlPlanes)}, {"workers", int64(q.Workers)}, {"cpus", int64(q.CPUs)},
		{"memory", int64(q.MemoryMiB)}, {"disk", int64(q.DiskGiB)}, {"wait-timeout", int64(o.cluster.Wait)},
	} {
		if f.number < 0 {
			return usagef("--%s: must not be negative", f.name)
		}
	}
	return nil
}

// options are what the flags say. A cluster that exists keeps its nodes unless others are
// asked for, as by naming a number of workers.
func (o *createFlags) options(workers bool) (_ devcluster.Options, err error) {
	if err := o.notNegative(); err != nil {
		return o.cluster, err
	}
	if o.cluster.Checkout, err = devcluster.Checkout(o.source); err != nil {
		return o.cluster, fmt.Errorf("%w; name one with --source", err)
	}
	q := &o.cluster.Cluster
	if workers {
		q.ControlPlanes = max(q.ControlPlanes, 1)
	}
	if q.Mirrors, err = parseMirrors(o.mirrors); err != nil {
		return o.cluster, err
	}
	for _, network := range []struct {
		flag, text, example string
		to                  *netip.Prefix
	}{{"cidr", o.cidr, "10.5.0.0/24", &q.Network}, {"wireguard-cidr", o.wireguard, "10.1.0.0/24", &q.WireGuard}} {
		if network.text == "" {
			continue
		}
		if *network.to, err = netip.ParsePrefix(network.text); err != nil {
			return o.cluster, usagef("--%s %q: must be a network, such as %s", network.flag, network.text, network.example)
		}
	}
	for _, p := range []struct {
		flags []string
		to    *[][]byte
	}{{o.patches, &q.Patches}, {o.controlPlanePatches, &q.ControlPlanePatches}, {o.workerPatches, &q.WorkerPatches}} {
		for _, flag := range p.flags {
			text, err := patchText(flag)
			if err != nil {
				return o.cluster, err
			}
			*p.to = append(*p.to, text)
		}
	}
	self, err := os.Executable()
	q.Self = []string{self, "cluster"}
	return o.cluster, err
}

func (a *app) clusterCreate(ctx context.Context, o devcluster.Options, merge bool) error {
	c, err := devcluster.Create(ctx, a.out, o)
	if err != nil {
		return err
	}
	after := ""
	if c.Started {
		after = fmt.Sprintf(", %.1f s after power-on", c.After.Seconds())
	}
	fmt.Fprintf(a.out, "cluster %s serves%s\n", c.Name, after)
	if !merge {
		fmt.Fprintf(a.out, "access to it: GARBOARDCONFIG=%s KUBECONFIG=%s\n", c.ClientConfig(), c.Kubeconfig())
		return nil
	}
	return a.mergeAccess(c.Cluster)
}

func (a *app) clusterDestroyCommand() *cobra.Command {
	var name string
	return nameFlag(&cobra.Command{
		Use:     "destroy",
		Short:   "Remove a cluster with all that it has",
		Example: `  gbctl cluster destroy --name three`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// First, as what it is goes with the cluster: should this be killed in
			// between, it can be done again.
			left := a.removeAccess(accessOf(name))
			existed, err := devcluster.Destroy(cmd.Context(), name)
			if err != nil {
				return errors.Join(err, left)
			}
			if existed {
				fmt.Fprintf(a.out, "cluster %s is gone\n", name)
			} else {
				fmt.Fprintf(a.out, "there is no cluster %s\n", name)
			}
			return left
		},
	}, &name)
}

const clusterShowLong = `Show the clusters of this machine, and for each node whether its machine runs.

STATE is running, starting or frozen; off or power cut; 'waiting to start again' after
a reboot or a crash; 'failed' with the reason; and for all nodes of a cluster that is
off, 'cluster is off': 'gbctl cluster create' brings it up. NETWORK is 'fine', or how
'gbctl cluster debug network' has spoilt it. SINCE is when the machine was last turned
on or off, and RESTARTS how often it has started again by itself since the cluster is
up. How nodes do as nodes, 'gbctl health' says.

-o yaml has ports on this machine, folders, and where the consoles are, too.`

func (a *app) clusterShowCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the clusters of this machine and how their nodes are",
		Long:  clusterShowLong,
		Example: `  gbctl cluster show
  gbctl cluster show --name three -o yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.clusterShow(cmd.Context(), name) },
	}
	cmd.Flags().StringVar(&name, "name", "", "show this cluster only")
	return a.outputFlag(cmd)
}

func (a *app) clusterShow(ctx context.Context, name string) error {
	var all []*qemu.Cluster
	var damaged error
	if name == "" {
		all, damaged = qemu.List()
	} else {
		c, err := openCluster(name)
		if err != nil {
			return err
		}
		all = append(all, c)
	}
	var rows [][]string
	var documents []*yaml.Node
	for _, c := range all {
		states, err := nodeStates(ctx, c)
		if err != nil {
			return err
		}
		var nodes []*yaml.Node
		for _, n := range c.Nodes {
			s := states[n.Name]
			since := ""
			if !s.Since.IsZero() {
				since = s.Since.UTC().Format(time.RFC3339)
			}
			state := s.State
			if s.Error != "" {
				state += ": " + visible(s.Error)
			}
			rows = append(rows, []string{c.Name, n.Name, n.Type, n.Address.String(), state, s.Network, since, strconv.Itoa(s.Restarts)})
			nodes = append(nodes, mapping("name", n.Name, "type", n.Type, "address", n.Address.String(), "machineAPI", loopback(n.APIPort),
				"state", s.State, "error", s.Error, "network", s.Network, "since", since, "restarts", s.Restarts, "console", c.Console(n.Name)))
		}
		documents = append(documents, mapping("cluster", c.Name, "provisioner", c.Provisioner, "network", c.Network.String(),
			"kubernetesAPI", loopback(c.KubernetesPort), "directory", c.Dir(), "kubeconfig", c.Kubeconfig(), "garboardconfig", c.ClientConfig(),
			"nodes", sequence(nodes)))
	}
	return errors.Join(a.show(documents, name != "", func() error {
		if len(all) == 0 && damaged == nil {
			_, err := fmt.Fprintln(a.out, "there is no cluster; 'gbctl cluster create' makes one")
			return err
		}
		return table(a.out, []string{"CLUSTER", "NODE", "TYPE", "ADDRESS", "STATE", "NETWORK", "SINCE", "RESTARTS"}, rows)
	}), damaged)
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// nodeStates are the states of a cluster's nodes, by name.
func nodeStates(ctx context.Context, c *qemu.Cluster) (map[string]qemu.NodeStatus, error) {
	states := map[string]qemu.NodeStatus{}
	for _, n := range c.Nodes {
		states[n.Name] = qemu.NodeStatus{State: "cluster is off"}
	}
	pid, err := c.HostPID()
	if err != nil || pid == 0 {
		return states, err
	}
	all, err := c.Status(ctx)
	if errors.Is(err, qemu.ErrSilent) && ctx.Err() == nil {
		// Another command may be at work there: the other clusters are shown.
		for name := range states {
			states[name] = qemu.NodeStatus{State: "unknown: its host process starts, stops or hangs"}
		}
		return states, nil
	}
	for _, s := range all {
		states[s.Name] = s
	}
	return states, err
}

func openCluster(name string) (*qemu.Cluster, error) {
	c, err := qemu.Open(name)
	if errors.Is(err, qemu.ErrNoCluster) {
		return nil, fmt.Errorf("there is no cluster %s; 'gbctl cluster create' makes one, 'gbctl cluster show' lists them", name)
	}
	return c, err
}

// clusterHostCommand is the process that holds a cluster; create starts it.
func clusterHostCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:     "host",
		Short:   "Hold a cluster: what create starts",
		Hidden:  true,
		Example: `  gbctl cluster host --cluster three`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return qemu.Host(cmd.Context(), name, slog.New(slog.NewTextHandler(os.Stderr, nil)))
		},
	}
	cmd.Flags().StringVar(&name, "cluster", devcluster.DefaultName, "name of the cluster")
	return cmd
}
