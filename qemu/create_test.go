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
		{Container, Options{KubernetesVersion: "1.34.9", Kubernetes: []string{"v1.35.4"}}, "version v1.34.9 of Kubernetes can't be built here: name a registry that has it as a mirror (--registry-mirror '*'=URL), or choose one of v1.36.3, v1.35.4, v1.34.4"},
		{Container, Options{ClockOffset: time.Hour}, "this machine's clock"},
		{QEMU, Options{CPUs: -1}, "can't be negative"},
		{QEMU, Options{WireGuard: netip.MustParsePrefix("10.1.0.0/30"), Workers: 2}, "with room for 1 control plane and 2 workers"},
		{QEMU, Options{WireGuard: netip.MustParsePrefix("10.5.0.128/25")}, "has addresses of the nodes' network"},
		{Container, Options{Workers: -1}, "can't be"},
		{Container, Options{ControlPlanes: 2, Later: 2}, "of 2 control planes 2 can't be turned on later"},
		{Container, Options{Network: netip.MustParsePrefix("10.5.0.1/24")}, "must be an IPv4 network"},
		{Container, Options{Network: netip.MustParsePrefix("fd00::/64")}, "must be an IPv4 network"},
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
