package kubelet

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func cluster(t *testing.T, change func(*config.Config)) *config.Config {
	t.Helper()
	endpoint, err := config.ParseURL("https://10.5.0.2:6443")
	if err != nil {
		t.Fatal(err)
	}
	c := &config.Config{}
	c.Machine.Type = config.Init
	c.Machine.Kubelet.ClusterDNS = []netip.Addr{netip.MustParseAddr("10.96.0.10")}
	c.Cluster.ControlPlane.Endpoint = endpoint
	c.Cluster.Token = "q9pyzr.0123456789abcdef"
	c.Cluster.Network.DNSDomain = "cluster.local"
	if change != nil {
		change(c)
	}
	return c
}

func configured(t *testing.T, mode boot.Mode, c *config.Config) object {
	t.Helper()
	k, err := kubeletConfiguration(mode, c)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// S-221: control planes are tainted unless the configuration lets pods in.
func TestS221ControlPlaneTaint(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		want   bool
	}{
		{"control plane", nil, true},
		{"one node", func(c *config.Config) { c.Cluster.AllowSchedulingOnControlPlanes = true }, false},
		{"worker", func(c *config.Config) { c.Machine.Type = config.Worker }, false},
	} {
		_, got := configured(t, boot.Machine, cluster(t, tt.change))["registerWithTaints"]
		if got != tt.want {
			t.Errorf("%s: tainted %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestNodeTaints(t *testing.T) {
	t.Parallel()
	c := cluster(t, func(c *config.Config) {
		c.Machine.Type = config.Worker
		c.Machine.Kubelet.NodeTaints = map[string]config.Taint{"b": {Effect: "NoExecute"}, "a/x": {Value: "1", Effect: "NoSchedule"}}
	})
	got := fmt.Sprint(configured(t, boot.Machine, c)["registerWithTaints"])
	if want := "[map[effect:NoSchedule key:a/x value:1] map[effect:NoExecute key:b]]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestExtraMounts(t *testing.T) {
	t.Parallel()
	c := cluster(t, func(c *config.Config) {
		c.Machine.Kubelet.ExtraMounts = []config.Volume{{HostPath: "/var/mnt/a", MountPath: "/mnt"}, {HostPath: "/b", MountPath: "/b", ReadOnly: true}}
	})
	got := fmt.Sprint(extraMounts(c))
	if want := "[{/mnt bind /var/mnt/a [rbind rshared rw] [] []} {/b bind /b [rbind rshared ro] [] []}]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// S-243, S-244: health on loopback, static pods from our directory.
func TestS243Configuration(t *testing.T) {
	t.Parallel()
	machine := configured(t, boot.Machine, cluster(t, nil))
	for key, want := range map[string]any{
		"healthzBindAddress": "127.0.0.1", "healthzPort": 10248, "staticPodPath": "/etc/kubernetes/manifests",
		"cgroupDriver": "cgroupfs", "clusterDNS": []any{"10.96.0.10"}, "tlsCertFile": servingCertFile,
	} {
		if diff := cmp.Diff(want, machine[key]); diff != "" {
			t.Errorf("%s: %s", key, diff)
		}
	}
	if _, ok := machine["failCgroupV1"]; ok {
		t.Error("a machine has cgroup v2 and must not tolerate v1")
	}
	if container := configured(t, boot.Container, cluster(t, nil)); container["failCgroupV1"] != false {
		t.Error("a container node may be on a host with cgroup v1")
	}
	without := configured(t, boot.Machine, cluster(t, func(c *config.Config) { c.Machine.Network.Resolver.Enabled = new(false) }))
	if machine["resolvConf"] != boot.PodResolvConf || without["resolvConf"] != "/etc/resolv.conf" {
		t.Errorf("pods get %s, and without the node's resolver %s", machine["resolvConf"], without["resolvConf"])
	}
	worker := configured(t, boot.Machine, cluster(t, func(c *config.Config) { c.Machine.Type = config.Worker }))
	if _, ok := worker["tlsCertFile"]; ok || worker["serverTLSBootstrap"] != true {
		t.Error("a worker has no serving certificate of ours, and asks the cluster for one")
	}
	if _, ok := machine["serverTLSBootstrap"]; ok {
		t.Error("a control plane has its serving certificate from the node")
	}
}

// The kubelet checks the parameters of the kernel on machines only, where they are the
// node's own, and not where the user has other ones: it would not start.
func TestKernelDefaultsAreProtected(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		mode    boot.Mode
		sysctls map[string]string
		want    any
	}{
		"machine":                   {boot.Machine, nil, true},
		"container":                 {boot.Container, nil, false},
		"other parameters":          {boot.Machine, map[string]string{"vm.max_map_count": "1"}, true},
		"the same value":            {boot.Machine, map[string]string{"kernel.panic": "10"}, true},
		"another value":             {boot.Machine, map[string]string{"kernel.panic": "0"}, false},
		"another value, by slashes": {boot.Machine, map[string]string{"vm/overcommit_memory": "2"}, false},
	} {
		got := configured(t, tt.mode, cluster(t, func(c *config.Config) { c.Machine.Sysctls = tt.sysctls }))
		if got["protectKernelDefaults"] != tt.want {
			t.Errorf("%s: protectKernelDefaults is %v, want %v", name, got["protectKernelDefaults"], tt.want)
		}
		if got["podPidsLimit"] != 4096 {
			t.Errorf("%s: podPidsLimit is %v", name, got["podPidsLimit"])
		}
	}
}

// A pod that has changed a parameter doesn't keep the kubelet from starting again.
func TestKernelDefaultsAreRestored(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, s := range boot.KubeletParameters {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, s.Name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, s.Name), []byte("7\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := restoreKernelDefaults(dir); err != nil {
		t.Fatal(err)
	}
	for _, s := range boot.KubeletParameters {
		if got, err := os.ReadFile(filepath.Join(dir, s.Name)); err != nil || strings.TrimSpace(string(got)) != s.Value {
			t.Errorf("%s is %q (%v), want %s", s.Name, got, err, s.Value)
		}
	}
	if err := restoreKernelDefaults(filepath.Join(dir, "none")); err == nil {
		t.Error("no error for parameters that can't be set")
	}
}

func TestS074CommandLine(t *testing.T) {
	t.Parallel()
	args := commandLine(cluster(t, func(c *config.Config) {
		c.Machine.Kubelet.NodeLabels = map[string]string{"b": "2", "a": "1"}
		c.Machine.Kubelet.ExtraArgs = config.Args{"v": {"4"}, "node-ip": {"10.9.9.9"}, "seccomp-default": {"false"}}
	}), "cp-1", []netip.Addr{netip.MustParseAddr("10.5.0.2")})
	for _, want := range []string{"--hostname-override=cp-1", "--node-labels=a=1,b=2", "--v=4", "--node-ip=10.9.9.9", "--seccomp-default=false"} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is missing in %q", want, args)
		}
	}
	if plain := commandLine(cluster(t, nil), "cp-1", []netip.Addr{netip.MustParseAddr("10.5.0.2")}); !slices.Contains(plain, "--seccomp-default=true") {
		t.Errorf("pods run without seccomp: %q", plain)
	}
	if args[0] != "kubelet" || !slices.IsSorted(args[1:]) {
		t.Errorf("not in a fixed order: %q", args)
	}
	for _, a := range args {
		if a == "q9pyzr.0123456789abcdef" {
			t.Error("the token is on the command line")
		}
	}
}

// The kubelet is told one address of each of the cluster's families, and listens at all of them.
func TestAddressesOfBothFamilies(t *testing.T) {
	t.Parallel()
	four, six := netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")
	all := []netip.Prefix{
		netip.MustParsePrefix("10.5.0.2/24"), netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("fd00:5::2/64"), netip.MustParsePrefix("fd00:6::2/64"),
	}
	for _, tt := range []struct {
		pods         []netip.Prefix
		primary      string
		all          []netip.Prefix
		want, listen string
	}{
		{[]netip.Prefix{four}, "10.5.0.2", all, "10.5.0.2", "0.0.0.0"},
		{[]netip.Prefix{four, six}, "10.5.0.2", all, "10.5.0.2,fd00:5::2", "::"},
		{[]netip.Prefix{six, four}, "10.5.0.2", all, "fd00:5::2,10.5.0.2", "::"},
		{[]netip.Prefix{six}, "10.5.0.2", all, "fd00:5::2", "::"},
		// the primary one first among its family
		{[]netip.Prefix{four, six}, "fd00:6::2", all, "10.5.0.2,fd00:6::2", "::"},
		{[]netip.Prefix{four, six}, "10.5.0.2", all[:2], "10.5.0.2", "::"}, // the other family may come later
		// a network plugin may have other subnets
		{[]netip.Prefix{four}, "fd00:5::2", all[2:], "fd00:5::2", "0.0.0.0"},
	} {
		c := cluster(t, func(c *config.Config) { c.Cluster.Network.PodSubnets = tt.pods })
		args := commandLine(c, "cp-1", c.Cluster.Network.NodeIPs(netip.MustParseAddr(tt.primary), tt.all))
		if !slices.Contains(args, "--node-ip="+tt.want) {
			t.Errorf("%v: %q, want %s", tt.pods, args, tt.want)
		}
		if got := configured(t, boot.Machine, c)["address"]; got != tt.listen {
			t.Errorf("%v: listens at %s, want %s", tt.pods, got, tt.listen)
		}
	}
}

// Whatever pods may write to on the node the kubelet sees as it is there, and mounts
// below it, which must come after it, go back to the node only where they are to.
func TestTheKubeletSeesWhatPodsWrite(t *testing.T) {
	t.Parallel()
	c := cluster(t, func(c *config.Config) {
		c.Machine.Kubelet.ExtraMounts = []config.Volume{{HostPath: "/var/lib/a", MountPath: "/var/lib/b"}}
	})
	all := slices.Concat(mounts, extraMounts(c))
	whole := slices.IndexFunc(all, func(m specs.Mount) bool { return m.Destination == boot.EphemeralDir })
	if whole < 0 || all[whole].Source != boot.EphemeralDir || !slices.Contains(all[whole].Options, "rw") {
		t.Fatalf("it doesn't see %s", boot.EphemeralDir)
	}
	if slices.Contains(all[whole].Options, "rshared") {
		t.Error("the mount of /var/lib/b would cover that of the node")
	}
	for i, m := range all {
		if strings.HasPrefix(m.Destination, boot.EphemeralDir+"/") && i < whole {
			t.Errorf("%s is covered by %s", m.Destination, boot.EphemeralDir)
		}
	}
}
