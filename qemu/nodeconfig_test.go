package qemu

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/google/go-cmp/cmp"
)

func testPlan(provisioner string) Plan {
	p := Plan{
		Name: "test", Provisioner: provisioner, Network: defaultNetwork, KubernetesPort: 20123,
		Boot:   Boot{Kernel: "/cache/vmlinuz", Initramfs: "/cache/initramfs", Cmdline: "garboard.debug=1"},
		Images: "/cache/images", Self: []string{"/path with blanks, commas/it's dev", "--quiet"},
		Nodes: []Node{{Name: "test-controlplane-1", Type: "init", Address: netip.MustParseAddr("10.5.0.2"), CPUs: 2, MemoryMiB: 2048, DiskGiB: 20}},
	}
	return p
}

// A node accepts every configuration that we make.
func TestNodeConfigurations(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ provisioner, endpoint, mirror, disk, address string }{
		{Container, "https://10.5.0.2:6443", "http://10.5.0.1:5000", "", "10.5.0.2/24"},
		{QEMU, "https://10.5.0.2:6443", "http://10.5.0.1:5000", "/dev/vda", ""},
	} {
		t.Run(tc.provisioner, func(t *testing.T) {
			t.Parallel()
			f, err := configurations(testPlan(tc.provisioner), Options{}, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			c, warnings, err := config.Load("config.yaml", f.nodes["test-controlplane-1"])
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range warnings {
				if !strings.Contains(w.String(), "images come without TLS") { // from this machine, to its own cluster
					t.Errorf("warning: %s", w)
				}
			}
			if got := c.Cluster.ControlPlane.Endpoint.String(); got != tc.endpoint {
				t.Errorf("endpoint %s, want %s", got, tc.endpoint)
			}
			if got := c.Machine.Registries.Mirrors["*"].Endpoints[0].String(); got != tc.mirror {
				t.Errorf("mirror %s, want %s", got, tc.mirror)
			}
			if c.Machine.Install.Disk != tc.disk || c.Machine.Type != config.Init || !c.Machine.Time.Disabled {
				t.Errorf("disk %q, type %q, time disabled %v", c.Machine.Install.Disk, c.Machine.Type, c.Machine.Time.Disabled)
			}
			address := ""
			if i := c.Machine.Network.Interfaces; len(i) > 0 {
				address = i[0].CIDR.String()
			}
			if address != tc.address {
				t.Errorf("address %s, want %s", address, tc.address)
			}
			if !strings.Contains(string(f.kubeconfig), "https://127.0.0.1:20123") {
				t.Errorf("kubeconfig:\n%s", f.kubeconfig)
			}
			// What 'gbctl kubeconfig' gets from a node leads there, too.
			if via := strings.TrimPrefix(tc.endpoint, "https://") + ": 127.0.0.1:20123\n"; !strings.Contains(strings.ReplaceAll(string(f.clientConfig), `"`, ""), via) {
				t.Errorf("the client configuration lacks %s:\n%s", via, f.clientConfig)
			}
		})
	}
}

// S-126, S-127, S-128: the mirrors in the configuration of a node. The last mirror of every
// registry, also of one that the user names, is the one with the images that were built.
func TestMirrors(t *testing.T) {
	t.Parallel()
	p := testPlan(QEMU)
	var err error
	p.Mirrors, err = network.NewMirrors(map[string][]string{
		"docker.io": {"http://10.5.0.1:5000/", "https://example.org"}, "registry.k8s.io": {"http://10.5.0.1:5000/"}, "*": {"https://example.org"},
	})
	if err != nil {
		t.Fatal(err)
	}
	f, err := configurations(p, Options{}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := config.Load("config.yaml", f.nodes["test-controlplane-1"])
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for host, mirror := range c.Machine.Registries.Mirrors {
		for _, endpoint := range mirror.Endpoints {
			got[host] = append(got[host], endpoint.String())
		}
	}
	want := map[string][]string{
		"*":               {"http://10.5.0.1:5001", "http://10.5.0.1:5000"},
		"docker.io":       {"http://10.5.0.1:5002", "http://10.5.0.1:5001", "http://10.5.0.1:5000"},
		"registry.k8s.io": {"http://10.5.0.1:5002", "http://10.5.0.1:5000"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Nodes with a way out ask the name server of this machine, and others none.
func TestNameServerOfTheInternet(t *testing.T) {
	t.Parallel()
	for open, want := range map[bool][]netip.Addr{true: {network.NameServer}, false: nil} {
		p := testPlan(Container)
		p.Internet = open
		f, err := configurations(p, Options{}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		c, _, err := config.Load("config.yaml", f.nodes["test-controlplane-1"])
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Machine.Network.Nameservers; !slices.Equal(got, want) {
			t.Errorf("internet %t: name servers %v", open, got)
		}
	}
}
