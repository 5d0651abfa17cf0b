package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/cobra"
)

// S-128, S-332: what each flag of cluster create says gets to who makes the cluster, and
// nothing else changes by it.
func TestS332FlagsOfClusterCreate(t *testing.T) {
	checkout := t.TempDir()
	if err := os.MkdirAll(filepath.Join(checkout, "image", "components"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "patch.yaml")
	if err := os.WriteFile(file, []byte("machine: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := image.Checkout(".")
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	untested := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z-]+)`).FindAllStringSubmatch((&app{}).clusterCreateCommand().LocalFlags().FlagUsages(), -1) {
		untested[m[1]] = true
	}
	for _, tc := range []struct {
		args []string
		want func(*devcluster.Options)
	}{
		{nil, func(*devcluster.Options) {}},
		{[]string{"--name", "three"}, func(o *devcluster.Options) { o.Cluster.Name = "three" }},
		{[]string{"--controlplanes", "3"}, func(o *devcluster.Options) { o.Cluster.ControlPlanes = 3 }},
		{[]string{"--workers", "2"}, func(o *devcluster.Options) { o.Cluster.ControlPlanes, o.Cluster.Workers = 1, 2 }},
		{[]string{"--workers", "0"}, func(o *devcluster.Options) { o.Cluster.ControlPlanes = 1 }},
		{[]string{"--controlplanes", "3", "--workers", "2"}, func(o *devcluster.Options) { o.Cluster.ControlPlanes, o.Cluster.Workers = 3, 2 }},
		{[]string{"--provisioner", "qemu"}, func(o *devcluster.Options) { o.Cluster.Provisioner = qemu.QEMU }},
		{[]string{"--cidr", "10.9.0.0/16"}, func(o *devcluster.Options) { o.Cluster.Network = netip.MustParsePrefix("10.9.0.0/16") }},
		{[]string{"--cidr", "10.9.0.0/16,fd00:9::/64"}, func(o *devcluster.Options) {
			o.Cluster.Network, o.Cluster.Second = netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("fd00:9::/64")
		}},
		{[]string{"--wireguard-cidr", "10.1.0.0/24"}, func(o *devcluster.Options) { o.Cluster.WireGuard = netip.MustParsePrefix("10.1.0.0/24") }},
		{[]string{"--registry-mirror", "*=http://a:1", "--registry-mirror", "docker.io=http://b", "--registry-mirror", "*=http://c"},
			func(o *devcluster.Options) {
				o.Cluster.Mirrors = map[string][]string{"*": {"http://a:1", "http://c"}, "docker.io": {"http://b"}}
			}},
		{[]string{"--kubernetes-version", "1.36.3"}, func(o *devcluster.Options) { o.Cluster.KubernetesVersion = "1.36.3" }},
		{[]string{"--install-image", "here/installer:1"}, func(o *devcluster.Options) { o.Cluster.InstallImage = "here/installer:1" }},
		{[]string{"--self-hosted"}, func(o *devcluster.Options) { o.Cluster.SelfHosted = true }},
		{[]string{"--internet"}, func(o *devcluster.Options) { o.Cluster.Internet = true }},
		{[]string{"--cpus", "3"}, func(o *devcluster.Options) { o.Cluster.CPUs = 3 }},
		{[]string{"--memory", "3072"}, func(o *devcluster.Options) { o.Cluster.MemoryMiB = 3072 }},
		{[]string{"--disk", "7"}, func(o *devcluster.Options) { o.Cluster.DiskGiB = 7 }},
		{[]string{"--config-patch", "a: 1", "--config-patch", "@" + file}, func(o *devcluster.Options) { o.Cluster.Patches = texts("a: 1", "machine: {}\n") }},
		{[]string{"--config-patch-control-plane", "a: 2"}, func(o *devcluster.Options) { o.Cluster.ControlPlanePatches = texts("a: 2") }},
		{[]string{"--config-patch-worker", "[a, b]"}, func(o *devcluster.Options) { o.Cluster.WorkerPatches = texts("[a, b]") }},
		{[]string{"--boot", "iso"}, func(o *devcluster.Options) { o.Boot = "iso" }},
		{[]string{"--boot", "disk"}, func(o *devcluster.Options) { o.Boot = "disk" }},
		{[]string{"--boot", "direct"}, func(*devcluster.Options) {}},
		{[]string{"--boot", "pxe"}, func(o *devcluster.Options) { o.Boot = "pxe" }},
		{[]string{"--disks", "3"}, func(o *devcluster.Options) { o.Cluster.Disks = 3 }},
		{[]string{"--bad-rtc"}, func(o *devcluster.Options) { o.Cluster.ClockOffset = -10 * 365 * 24 * time.Hour }},
		{[]string{"--uefi"}, func(o *devcluster.Options) { o.UEFI = true }},
		{[]string{"--bios"}, func(*devcluster.Options) {}},
		{[]string{"--wait-timeout", "90s"}, func(o *devcluster.Options) { o.Wait = 90 * time.Second }},
		{[]string{"--source", filepath.Join(checkout, "image")}, func(o *devcluster.Options) { o.Checkout = checkout }},
		{[]string{"--merge=false"}, func(*devcluster.Options) {}},
	} {
		want := devcluster.Options{Checkout: here, Cluster: qemu.Options{
			Name: devcluster.DefaultName, Provisioner: qemu.Auto, Mirrors: map[string][]string{}, Self: []string{self, "cluster"},
		}}
		tc.want(&want)
		var o createFlags
		cmd := &cobra.Command{Use: "create"}
		o.flags(cmd)
		if err := cmd.ParseFlags(tc.args); err != nil {
			t.Fatal(err)
		}
		got, err := o.options(cmd.Flags())
		if err != nil {
			t.Errorf("%q: %v", tc.args, err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%q:\n%s", tc.args, diff)
		}
		if o.merge != !cmd.Flags().Changed("merge") {
			t.Errorf("%q: access is merged: %v", tc.args, o.merge)
		}
		for _, arg := range tc.args {
			name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
			untested[name] = false
		}
	}
	for name, yes := range untested {
		if yes {
			t.Errorf("--%s isn't in the table", name)
		}
	}
}

func texts(all ...string) (to [][]byte) {
	for _, text := range all {
		to = append(to, []byte(text))
	}
	return to
}

// What a flag can't mean is said with the flag, before anything is built.
func TestFlagsThatCantBe(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	for args, want := range map[string]string{
		"--workers -1":                    "--workers: must not be negative",
		"--controlplanes -1":              "--controlplanes: must not be negative",
		"--cpus -1":                       "--cpus: must not be negative",
		"--memory -1":                     "--memory: must not be negative",
		"--disk -1":                       "--disk: must not be negative",
		"--boot floppy":                   "must be one of direct, iso, disk, pxe",
		"--uefi --bios":                   "[bios uefi]",
		"--wait-timeout -1s":              "--wait-timeout: must not be negative",
		"--cidr 10.9.0.0":                 `--cidr "10.9.0.0": must be a network, such as 10.5.0.0/24`,
		"--wireguard-cidr wg0":            `--wireguard-cidr "wg0": must be a network, such as 10.1.0.0/24`,
		"--registry-mirror docker.io":     "must be HOST=URL",
		"--config-patch @nosuch.yaml":     "nosuch.yaml",
		"--source /":                      "isn't inside a checkout of Garboard; use --source",
		"--name Upper --provisioner qemu": `cluster name "Upper": must be`,
		"--provisioner podman":            "must be one of auto, qemu, container, docker",
		"--registry-mirror *=nowhere":     "must be a URL such as http://127.0.0.1:5000",
		"--cidr 10.5.0.0/24,fd00:5::1/64": "must be a network, such as fd00:5::/64",
		"--cidr 10.5.0.0/24,fd00:5::":     `--cidr "fd00:5::": must be a network, such as fd00:5::/64`,
	} {
		var out strings.Builder
		a := &app{out: &out, err: &out}
		root := a.rootCommand()
		root.SetArgs(append([]string{"cluster", "create"}, strings.Fields(args)...))
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("%s: %v, want %q; it said %q", args, err, want, out.String())
		}
	}
}
