//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

func (a *app) clusterCommand() *cobra.Command {
	return group("cluster", a.clusterCreateCommand(), a.clusterDestroyCommand(), a.clusterShowCommand(), a.clusterLoadCommand(), a.clusterDebugCommand(), clusterHostCommand())
}

func nameFlag(cmd *cobra.Command, name *string) *cobra.Command {
	cmd.Flags().StringVar(name, "name", devcluster.DefaultName, "name of the cluster")
	must(cmd.RegisterFlagCompletionFunc("name", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return clusterNames(), cobra.ShellCompDirectiveNoFileComp
	}))
	return cmd
}

func clusterNames() []string {
	all, _ := qemu.List() // without damaged ones
	return ofEach(all, func(c *qemu.Cluster) string { return c.Name })
}

// createFlags are the flags of cluster create.
type createFlags struct {
	cluster devcluster.Options
	source  string
	cidr    string
	merge   bool

	wireguard string
	boot      string
	badRTC    bool
	patches   nodePatches
}

// bootDirect is the value of --boot that is no kind of media.
const bootDirect = "direct"

// badClock is the error of hardware clocks with --bad-rtc: some years behind.
const badClock = -10 * 365 * 24 * time.Hour

func (a *app) clusterCreateCommand() *cobra.Command {
	var o createFlags
	cmd := command("create", func(cmd *cobra.Command, _ []string) error {
		options, err := o.options(cmd.Flags())
		if err != nil {
			return err
		}
		return a.clusterCreate(cmd.Context(), options, o.merge)
	})
	o.flags(cmd)
	return cmd
}

// flags adds the flags of cluster create.
func (o *createFlags) flags(cmd *cobra.Command) {
	q := &o.cluster.Cluster
	f := nameFlag(cmd, &q.Name).Flags()
	f.IntVar(&q.ControlPlanes, "controlplanes", 0, "number of control planes, at least 1; use an odd number (default 1; for an existing cluster without --workers: unchanged)")
	f.IntVar(&q.Workers, "workers", 0, "number of workers (default 0; for an existing cluster without --controlplanes: unchanged)")
	choiceFlag(cmd, &q.Provisioner, "provisioner", "", "how nodes run: qemu, container (needs root), docker, or auto (QEMU if KVM can run a guest, else containers, or Docker without root)", qemu.Auto, qemu.QEMU, qemu.Container, qemu.Docker)
	f.StringVar(&o.cidr, "cidr", "", "network of the nodes, of IPv4 or IPv6, or one of each, such as 10.5.0.0/24,fd00:5::/64 (default 10.5.0.0/24); this machine is the gateway, with the first address")
	f.StringVar(&o.wireguard, "wireguard-cidr", "", "IPv4 network of a WireGuard VPN between the nodes, such as 10.1.0.0/24 (default none)")
	mirrorsVar(f, &q.Mirrors, "nodes use URL, through this machine, instead of the registry HOST, and then the images that were built; '*' is every registry without a mirror of its own")
	f.BoolVar(&q.Internet, "internet", false, "let nodes and pods connect to what this machine can connect to, by IPv4 (default: the network of a cluster has no way out)")
	f.StringVar(&q.KubernetesVersion, "kubernetes-version", "", "version of Kubernetes: "+strings.Join(components.KubernetesVersions(), " or ")+", which can be built, or another one from a registry mirror (default "+config.KubernetesVersion+"); nodes of an existing cluster keep theirs, and can pull this one too")
	f.StringVar(&q.InstallImage, "install-image", "", "installer image, for machine.install.image: nodes that boot with --boot iso or pxe install themselves from it (default: from the ISO, and with pxe the one that was built)")
	f.BoolVar(&q.SelfHosted, "self-hosted", false, "run the control plane of a new cluster as pods of the cluster itself, as releases before static pods did, to test its conversion")
	f.IntVar(&q.CPUs, "cpus", 0, "processors of each node (default 2 in QEMU, all in a container)")
	f.IntVar(&q.MemoryMiB, "memory", 0, "memory of each node, in MiB; a control plane needs 2048, a worker 1024 (default 4096 in QEMU, all in a container)")
	f.IntVar(&q.DiskGiB, "disk", 0, "disk size of each node in QEMU, in GiB; the file grows with its content (default 20)")
	f.IntVar(&q.Disks, "disks", 0, "number of disks of each node in QEMU, of that size; further ones are empty (default 1)")
	f.BoolVar(&o.badRTC, "bad-rtc", false, "start nodes in QEMU with hardware clocks that are ten years behind")
	o.patches.add(f)
	choiceFlag(cmd, &o.boot, "boot", "", "how nodes in QEMU boot: direct (QEMU loads the kernel, which is fast), or with firmware and boot loader: iso (they install themselves from a CD), pxe (over the network, from an installer image), or disk (the system is on their disk)", bootDirect, media.ISO, media.Disk, media.PXE)
	f.BoolVar(&o.cluster.UEFI, "uefi", false, "give nodes in QEMU a UEFI instead of a BIOS")
	f.Bool("bios", false, "give nodes in QEMU a BIOS (the default)")
	cmd.MarkFlagsMutuallyExclusive("uefi", "bios")
	f.DurationVar(&o.cluster.Wait, "wait-timeout", 0, "how long the cluster may take until it is ready, from power-on, such as 90s or 10m (default "+devcluster.ReadyBudgets+")")
	f.StringVar(&o.source, "source", ".", "checkout of Garboard to build from, or a directory in it")
	f.BoolVar(&o.merge, "merge", true, "merge the access into the client configuration and the kubeconfig")
}

// options converts the flags. An existing cluster keeps its nodes unless the flags ask
// for other ones, for example with a number of workers.
func (o *createFlags) options(f *pflag.FlagSet) (_ devcluster.Options, err error) {
	f.Visit(func(f *pflag.Flag) {
		if strings.HasPrefix(f.Value.String(), "-") && slices.Contains([]string{"int", "duration"}, f.Value.Type()) {
			err = usagef("--%s: must not be negative", f.Name)
		}
	})
	if err != nil {
		return o.cluster, err
	}
	if o.cluster.Checkout, err = image.Checkout(o.source); err != nil {
		return o.cluster, fmt.Errorf("%w; use --source", err)
	}
	if o.boot != bootDirect {
		o.cluster.Boot = o.boot
	}
	if o.badRTC {
		o.cluster.Cluster.ClockOffset = badClock
	}
	q := &o.cluster.Cluster
	if f.Changed("workers") {
		q.ControlPlanes = max(q.ControlPlanes, 1)
	}
	cidr, second, _ := strings.Cut(o.cidr, ",")
	for _, network := range []struct {
		flag, text, example string
		to                  *netip.Prefix
	}{{"cidr", cidr, "10.5.0.0/24", &q.Network}, {"cidr", second, "fd00:5::/64", &q.Second}, {"wireguard-cidr", o.wireguard, "10.1.0.0/24", &q.WireGuard}} {
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
	}{{o.patches.all, &q.Patches}, {o.patches.controlPlanes, &q.ControlPlanePatches}, {o.patches.workers, &q.WorkerPatches}} {
		if *p.to, err = patchTexts(p.flags, readInput); err != nil {
			return o.cluster, err
		}
	}
	self, err := os.Executable()
	q.Self = []string{self, "cluster"}
	return o.cluster, err
}

func (a *app) clusterCreate(ctx context.Context, o devcluster.Options, merge bool) error {
	c, err := devcluster.Create(ctx, a.out, o)
	if err == nil || errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		a.clusterFindings(ctx, o.Cluster.Name)
	}
	if err != nil {
		return err
	}
	after := ""
	if c.Started {
		after = fmt.Sprintf(", %.1f s after power-on", c.After.Seconds())
	}
	fmt.Fprintf(a.out, "cluster %s serves%s\n", c.Name, after)
	if !merge {
		fmt.Fprintf(a.out, "access to it: GARBOARDCONFIG=%s KUBECONFIG=%s\n", shellWord(c.ClientConfig()), shellWord(c.Kubeconfig()))
		return nil
	}
	return a.mergeAccess(c.Cluster)
}

// clusterFindings shows what the nodes of a new cluster find wrong: what they wait for, and manifests that can't be
// made, without which the cluster is ready all the same.
func (a *app) clusterFindings(ctx context.Context, name string) {
	c, err := qemu.Open(name)
	if err != nil {
		return
	}
	own := &app{in: a.in, out: a.out, err: a.err, timeout: a.timeout, configPath: c.ClientConfig()}
	answers, _ := gather(ctx, own, diagnose) // a node that doesn't answer yet is no other problem than that of the wait
	for _, n := range answers {
		n.value.Findings = slices.DeleteFunc(n.value.Findings, func(f *apiv1.Finding) bool {
			return f.Severity == apiv1.Finding_SEVERITY_INFO && !strings.HasPrefix(f.Id, "manifest-")
		})
		if len(n.value.Findings) > 0 {
			_ = own.findings(n.node, n.value)
		}
	}
}

func (a *app) clusterDestroyCommand() *cobra.Command {
	var name string
	return nameFlag(command("destroy", func(cmd *cobra.Command, _ []string) error {
		// This is first, because it reads files of the cluster: if gbctl is killed in
		// between, the command can be repeated.
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
	}), &name)
}

func (a *app) clusterShowCommand() *cobra.Command {
	var name string
	cmd := command("show", func(cmd *cobra.Command, _ []string) error { return a.clusterShow(cmd.Context(), name) })
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
			network := s.Network
			if c.Internet && network != "" {
				network += ", with the internet"
			}
			rows = append(rows, []string{c.Name, n.Name, n.Type, n.Address.String(), state, network, since, strconv.Itoa(s.Restarts), loopback(n.APIPort)})
			nodes = append(nodes, mapping("name", n.Name, "type", n.Type, "address", n.Address.String(), "machineAPI", loopback(n.APIPort),
				"state", s.State, "error", s.Error, "network", s.Network, "since", since, "restarts", s.Restarts, "console", c.Console(n.Name)))
		}
		documents = append(documents, mapping("cluster", c.Name, "provisioner", c.Provisioner, "network", c.Network.String(), "internet", c.Internet,
			"kubernetesAPI", loopback(c.KubernetesPort), "directory", c.Dir(), "kubeconfig", c.Kubeconfig(), "garboardconfig", c.ClientConfig(),
			"nodes", sequence(nodes)))
	}
	return errors.Join(a.show(documents, name != "", func() error {
		if len(all) == 0 && damaged == nil {
			_, err := fmt.Fprintln(a.out, "no cluster; 'gbctl cluster create' makes one")
			return err
		}
		return table(a.out, []string{"CLUSTER", "NODE", "TYPE", "ADDRESS", "STATE", "NETWORK", "SINCE", "RESTARTS", "MACHINE API"}, rows)
	}), damaged)
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// nodeStates returns the states of the nodes of a cluster, by name.
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
		// Another command may be using it: show the other clusters.
		for name := range states {
			states[name] = qemu.NodeStatus{State: "unknown: the host process doesn't answer: it starts, stops or hangs"}
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
		err = fmt.Errorf("there is no cluster %s; 'gbctl cluster create' makes one, 'gbctl cluster show' lists them", name)
		if best := config.Closest(name, clusterNames()); best != "" {
			err = fmt.Errorf("there is no cluster %s; did you mean --name %s?", name, shellWord(best))
		}
		return nil, err
	}
	return c, err
}

// clusterHostCommand runs the host process of a cluster; cluster create starts it.
func clusterHostCommand() *cobra.Command {
	var name string
	cmd := command("host", func(cmd *cobra.Command, _ []string) error {
		return qemu.Host(cmd.Context(), name, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	})
	cmd.Hidden = true
	cmd.Flags().StringVar(&name, "cluster", devcluster.DefaultName, "name of the cluster")
	return cmd
}

func (a *app) clusterLoadCommand() *cobra.Command {
	var cluster string
	return nameFlag(command("load IMAGE|FILE...", func(cmd *cobra.Command, args []string) error {
		c, err := openRunning(cluster)
		if err != nil {
			return err
		}
		for _, from := range args {
			if err := a.clusterLoad(cmd.Context(), c, from); err != nil {
				return err
			}
		}
		return nil
	}), &cluster)
}

// clusterLoad gives an image to the cluster, and has all nodes take it in place of the one that they have.
func (a *app) clusterLoad(ctx context.Context, c *qemu.Cluster, from string) (err error) {
	file, done, err := fromDocker(ctx, from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	var image string
	bundle := imagebundle.Bundle{Say: func(line string) { fmt.Fprintln(a.notes(), line) }}
	err = bundle.Image(ctx, file, func(called string, content v1.Image) error {
		named, err := reference.ParseDockerRef(called)
		if err != nil {
			return fmt.Errorf("%s: the image needs a name with a tag, for pods to ask for (docker tag): %w", from, err)
		}
		ref, err := name.NewTag(named.String())
		if err != nil {
			return fmt.Errorf("%s: a name with a digest is that of one registry; name a tag: %w", from, err)
		}
		image = named.String()
		return c.Load(ctx, ref, content)
	})
	if err != nil {
		return err
	}
	nodes := &app{in: a.in, out: a.out, err: a.err, timeout: a.timeout, quiet: a.quiet, configPath: c.ClientConfig()}
	return nodes.sequential(ctx, func(ctx context.Context, c *client.Client) error {
		return nodes.pullImage(ctx, c, &apiv1.PullImageRequest{Image: image, Kubernetes: true, Again: true})
	})
}

// fromDocker is a file with an image of the Docker of this machine, until done is called. What Docker doesn't have
// stays as it is.
func fromDocker(ctx context.Context, image string) (file string, done func() error, err error) {
	none := func() error { return nil }
	if _, err := os.Stat(image); !errors.Is(err, fs.ErrNotExist) || exec.CommandContext(ctx, "docker", "image", "inspect", image).Run() != nil {
		return image, none, nil
	}
	dir, err := os.MkdirTemp("", "gbctl-load-*")
	if err != nil {
		return "", none, err
	}
	file = filepath.Join(dir, "image.tar")
	if out, err := exec.CommandContext(ctx, "docker", "image", "save", "--output", file, image).CombinedOutput(); err != nil {
		return "", none, errors.Join(fmt.Errorf("docker image save %s: %w: %s", image, err, out), os.RemoveAll(dir))
	}
	return file, func() error { return os.RemoveAll(dir) }, nil
}
