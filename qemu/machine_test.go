package qemu

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func testPlan(provisioner string) Plan {
	p := Plan{
		Name: "test", Provisioner: provisioner, Network: defaultNetwork, KubernetesPort: 20123,
		Boot:   Boot{Kernel: "/cache/vmlinuz", Initramfs: "/cache/initramfs", Cmdline: "garboard.debug=1"},
		Images: "/cache/images", Self: []string{"/path with blanks, commas/it's dev", "--quiet"},
		Nodes: []Node{{Name: "test-controlplane-1", Type: "init", Address: netip.MustParseAddr("10.5.0.2"), CPUs: 2, MemoryMiB: 2048, DiskGiB: 20}},
	}
	return p
}

func TestQEMUArguments(t *testing.T) {
	t.Parallel()
	for _, accelerator := range []string{"tcg", "kvm"} {
		p := testPlan(QEMU)
		p.Accelerator = accelerator
		if accelerator == "kvm" {
			p.Nodes[0].ClockOffset = -365 * 24 * time.Hour
		}
		args := machine{now: time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), plan: p, node: p.Nodes[0], dir: "/home/me/.garboard/clusters/a,b"}.arguments()
		got := strings.Join(args, "\n") + "\n"
		golden := filepath.Join("testdata", "arguments-"+accelerator)
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got; -update writes it):\n%s", golden, diff)
		}
	}
}

// Every configuration that we make is one that a node accepts.
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
				t.Errorf("warning: %s", w)
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
		})
	}
}

func TestIdentitiesAreStable(t *testing.T) {
	t.Parallel()
	if a, b := machineUUID("a", "n"), machineUUID("a", "n"); a != b || len(a) != 36 || a == machineUUID("b", "n") {
		t.Errorf("UUIDs %s, %s", a, b)
	}
	if a, b := hardwareAddress("a", "n").String(), hardwareAddress("a", "n").String(); a != b || a == hardwareAddress("b", "n").String() {
		t.Errorf("MAC addresses %s, %s", a, b)
	}
	if m := hardwareAddress("a", "n"); m[0]&3 != 2 { // locally administered, not multicast
		t.Errorf("MAC address %s", m)
	}
}

func TestDiskIsMadeOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := makeDisk(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeDisk(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(path); string(data) != "data" {
		t.Errorf("disk is now %q", data)
	}
}
