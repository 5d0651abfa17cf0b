package qemu

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
)

// S-332, S-333: names, addresses and types of the nodes.
func TestS332Nodes(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	p, err := newPlan(Options{Name: "c", ControlPlanes: 3, Workers: 2, Later: 1}, Choice{Name: Container})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	ports := map[int]bool{p.KubernetesPort: true}
	for _, n := range p.Nodes {
		got = append(got, fmt.Sprintf("%s %s %s", n.Name, n.Type, n.Address))
		ports[n.APIPort] = true
	}
	want := []string{
		"c-controlplane-1 init 10.5.0.2", "c-controlplane-2 controlplane 10.5.0.3", "c-controlplane-3 controlplane 10.5.0.4",
		"c-worker-1 worker 10.5.0.5", "c-worker-2 worker 10.5.0.6",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, n := range p.Nodes {
		if n.Later != (n.Name == "c-controlplane-3") {
			t.Errorf("%s is later: %v", n.Name, n.Later)
		}
	}
	if len(ports) != 6 {
		t.Errorf("%d different ports, not 6: %v", len(ports), ports)
	}
}

func TestPlansThatCantBe(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	for _, tc := range []struct {
		provisioner string
		o           Options
		want        string
	}{
		{Container, Options{Mirrors: map[string][]string{"*": {"10.5.0.1:5001"}}}, "must be a URL"},
		{Container, Options{KubernetesVersion: "1.35.9", Kubernetes: []string{"v1.36.3"}}, "version v1.35.9 of Kubernetes can't be built here: name a registry that has it as a mirror (--registry-mirror '*'=URL), or choose one of v1.37.2, v1.36.3, v1.35.4"},
		{Container, Options{ClockOffset: time.Hour}, "this machine's clock"},
		{QEMU, Options{CPUs: -1}, "can't be negative"},
		{QEMU, Options{WireGuard: netip.MustParsePrefix("10.1.0.0/30"), Workers: 2}, "with room for 1 control plane and 2 workers"},
		{QEMU, Options{WireGuard: netip.MustParsePrefix("10.5.0.128/25")}, "has addresses of the nodes' network"},
		{Container, Options{Workers: -1}, "can't be"},
		{Container, Options{ControlPlanes: 2, Later: 2}, "of 2 control planes 2 can't be turned on later"},
		{Container, Options{Network: netip.MustParsePrefix("10.5.0.1/24")}, "must be a network, such as 10.5.0.0/24"},
		{Container, Options{Second: netip.MustParsePrefix("10.6.0.0/24")}, "must be one of IPv4 and one of IPv6"},
		{Container, Options{Network: netip.MustParsePrefix("fd00::/64"), Second: netip.MustParsePrefix("fd01::/64")}, "must be one of IPv4 and one of IPv6"},
		{Container, Options{Second: netip.MustParsePrefix("fd00:5::/126"), Workers: 5}, "network fd00:5::/126 has no room"},
		{Docker, Options{Second: netip.MustParsePrefix("fd00:5::/64")}, "IPv4 only"},
		{QEMU, Options{Network: netip.MustParsePrefix("fd00:5::/64"), Unconfigured: true}, "DHCP"},
		{Docker, Options{Internet: true}, "a way to the internet is for nodes in containers or QEMU"},
		{Container, Options{Internet: true, Network: netip.MustParsePrefix("fd00:5::/64")}, "in a network of IPv4"},
		{Container, Options{Network: netip.MustParsePrefix("10.5.0.0/29"), Workers: 5}, "no room for 1 control plane and 5 workers"},
	} {
		tc.o.Name = "c"
		if _, err := newPlan(tc.o, Choice{Name: tc.provisioner}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.o, err, tc.want)
		}
	}
	if p, err := newPlan(Options{Name: "c", Network: netip.MustParsePrefix("10.5.0.0/29"), Workers: 4}, Choice{Name: Container}); err != nil || p.Nodes[4].Address.String() != "10.5.0.6" {
		t.Errorf("a full network: %v, %v", p.Nodes, err)
	}
}

// A cluster has the networks, addresses, subnets and shared addresses of one family or both.
func TestFamiliesOfAPlan(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	four, six := netip.MustParsePrefix("10.5.0.0/24"), netip.MustParsePrefix("fd00:5::/64")
	for _, tc := range []struct {
		provisioner string
		o           Options
		want        string
	}{
		{Container, Options{}, "10.5.0.2/24 via 10.5.0.1 shares 10.5.0.254; pods [10.244.0.0/16] services [10.96.0.0/12]"},
		{Container, Options{Second: six}, "10.5.0.2/24 via 10.5.0.1 shares 10.5.0.254; fd00:5::2/64 via fd00:5::1 shares fd00:5::ffff:ffff:ffff:fffe; " +
			"pods [10.244.0.0/16 fd00:10:244::/56] services [10.96.0.0/12 fd00:10:96::/112]"},
		{Container, Options{Network: six, Second: four}, "fd00:5::2/64 via fd00:5::1 shares fd00:5::ffff:ffff:ffff:fffe; 10.5.0.2/24 via 10.5.0.1 shares 10.5.0.254; " +
			"pods [fd00:10:244::/56 10.244.0.0/16] services [fd00:10:96::/112 10.96.0.0/12]"},
		{Container, Options{Network: six}, "fd00:5::2/64 via fd00:5::1 shares fd00:5::ffff:ffff:ffff:fffe; pods [fd00:10:244::/56] services [fd00:10:96::/112]"},
		{QEMU, Options{Second: six}, "dhcp shares 10.5.0.254; fd00:5::2/64 via fd00:5::1 shares fd00:5::ffff:ffff:ffff:fffe; " +
			"pods [10.244.0.0/16 fd00:10:244::/56] services [10.96.0.0/12 fd00:10:96::/112]"},
	} {
		tc.o.Name, tc.o.SharedAddress = "c", true
		p, err := newPlan(tc.o, Choice{Name: tc.provisioner})
		if err != nil {
			t.Fatal(err)
		}
		f, err := configurations(p, tc.o, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		c, _, err := config.Load("c", f.nodes[p.Nodes[0].Name])
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, in := range c.Machine.Network.Interfaces {
			where := "dhcp"
			if !in.DHCP {
				where = fmt.Sprintf("%s via %s", in.CIDR, in.Routes[0].Gateway)
			}
			got += fmt.Sprintf("%s shares %s; ", where, in.VIP.IP)
		}
		got += fmt.Sprintf("pods %v services %v", c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets)
		if got != tc.want {
			t.Errorf("%+v:\n%s, want\n%s", tc.o, got, tc.want)
		}
	}
}

// Invalid options are found before the files to boot are built, which takes minutes.
func TestCheck(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	plan := testPlan(Container)
	d, _ := dirOf(plan.Name)
	if err := errors.Join(os.MkdirAll(string(d), 0o700), writePlan(d, plan)); err != nil {
		t.Fatal(err)
	}
	for want, o := range map[string]Options{
		"":                                       {Name: "new"},
		"must be 1 to 40":                        {Name: "New"},
		"no room":                                {Name: "new", Workers: 300},
		"nosuch":                                 {Name: "new", Patches: [][]byte{[]byte(`machine: {nosuch: 1}`)}},
		"exists with provisioner container":      {Name: plan.Name, Provisioner: QEMU},
		"exists with 1 control plane and 0 work": {Name: plan.Name, ControlPlanes: 1, Workers: 1},
	} {
		o.Choice = Choice{Name: Container}
		if err := Check(o); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
	if err := Check(Options{Name: plan.Name}); err != nil {
		t.Errorf("the cluster that exists: %v", err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(string(d)), "new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("looking at a new cluster left something: %v", err)
	}
}

// With several nodes the endpoint is the load balancer's, pods don't run on control
// planes, and workers have no authority's key. Patches are applied only to their nodes.
func TestConfigurationsOfSeveral(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	o := Options{
		Name: "c", ControlPlanes: 2, Workers: 1, Network: netip.MustParsePrefix("10.9.0.0/16"),
		Patches:             [][]byte{[]byte(`machine: {sysctls: {kernel.pid_max: "100000"}}`)},
		ControlPlanePatches: [][]byte{[]byte(`cluster: {allowSchedulingOnControlPlanes: true}`)},
		WorkerPatches:       [][]byte{[]byte(`[{op: add, path: /machine/kubelet/nodeLabels, value: {a: b}}]`)},
	}
	p, err := newPlan(o, Choice{Name: Container})
	if err != nil {
		t.Fatal(err)
	}
	f, err := configurations(p, o, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range p.Nodes {
		c, _, err := config.Load(n.Name, f.nodes[n.Name])
		if err != nil {
			t.Fatal(err)
		}
		control := n.Type != "worker"
		if got := c.Cluster.ControlPlane.Endpoint.String(); got != "https://10.9.0.1:6443" {
			t.Errorf("%s: endpoint %s", n.Name, got)
		}
		if c.Machine.Sysctls["kernel.pid_max"] != "100000" || c.Cluster.AllowSchedulingOnControlPlanes != control || (c.Machine.Kubelet.NodeLabels["a"] == "b") == control {
			t.Errorf("%s: patches went astray", n.Name)
		}
		if len(c.Cluster.CA.Key) > 0 != control || len(c.Machine.CA.Key) > 0 != control {
			t.Errorf("%s: holds keys of authorities: %v", n.Name, !control)
		}
	}
	o.Patches = [][]byte{[]byte(`machine: {nosuch: 1}`)}
	if _, err := configurations(p, o, time.Now()); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("a patch that a node wouldn't take: %v", err)
	}
	// S-131: machines that are installed from an image have its name.
	p = testPlan(QEMU)
	f, err = configurations(p, Options{InstallImage: "registry.example/installer:v1"}, time.Now())
	if err != nil || !strings.Contains(string(f.nodes[p.Nodes[0].Name]), "image: registry.example/installer:v1\n") {
		t.Errorf("--install-image: %v", err)
	}
}
