package controlplane

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

var update = flag.Bool("update", false, "write what is rendered into testdata")

// golden compares with a file that was reviewed.
func golden(t *testing.T, name string, v any) {
	t.Helper()
	got, err := yaml.Marshal(v)
	put(t, err)
	path := filepath.Join("testdata", name+".yaml")
	if *update {
		put(t, os.MkdirAll(filepath.Dir(path), 0o755))
		put(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	put(t, err)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got), go test -update writes it anew:\n%s", path, diff)
	}
}

// S-262, S-342: the pods, with a user's additions and overrides.
func TestPods(t *testing.T) {
	c := testConfig(t)
	c.Cluster.APIServer.ExtraArgs = config.Args{"profiling": {"true"}, "v": {"2"}}
	c.Cluster.APIServer.ExtraVolumes = []config.Volume{{HostPath: "/var/policy", MountPath: "/policy", ReadOnly: true}}
	for _, program := range Programs {
		pod, err := staticPod(podInput{
			program: program, cluster: &c.Cluster, configVersion: 3, secretsVersion: "0123456789abcdef", address: netip.MustParseAddr("192.0.2.10"),
			secretsDir: "/system/secrets/kubernetes", filesDir: "/etc/kubernetes", auditDir: "/var/log/audit/kube",
		})
		put(t, err)
		golden(t, "pods/"+program, pod)
	}
}

// A user's volume replaces the node's at the same path: a pod can't have both.
func TestUsersVolumeWins(t *testing.T) {
	c := testConfig(t)
	c.Cluster.APIServer.ExtraVolumes = []config.Volume{{HostPath: "/var/mine", MountPath: "/audit"}}
	pod, err := staticPod(podInput{program: apiServer, cluster: &c.Cluster, address: testAddress, auditDir: "/audit"})
	put(t, err)
	var there []string
	for _, v := range pod.List("spec", "volumes") {
		there = append(there, kubeclient.Object(v).Text("hostPath", "path"))
	}
	if slices.Contains(there, "/audit") || !slices.Contains(there, "/var/mine") {
		t.Errorf("volumes %q", there)
	}
}

// S-267
func TestProgramConfigs(t *testing.T) {
	c := testConfig(t)
	for _, spec := range programConfigs(&c.Cluster) {
		golden(t, "configs/"+spec.program(), spec)
	}
}

func TestIPv6NodeBindsBoth(t *testing.T) {
	pod, err := staticPod(podInput{program: apiServer, cluster: &testConfig(t).Cluster, address: netip.MustParseAddr("2001:db8::1")})
	put(t, err)
	command := fmt.Sprint(pod.List("spec", "containers")[0]["command"])
	if !strings.Contains(command, "--bind-address=:: ") || !strings.Contains(command, "--advertise-address=2001:db8::1 ") {
		t.Error(command)
	}
}

// S-264, S-266: exactly the manifests of the documents, without the pod security
// policy that Kubernetes no longer has, and with flannel, the default CNI.
func TestManifests(t *testing.T) {
	c := testConfig(t)
	c.Cluster.Network.Policies, c.Cluster.Network.PolicyAgent.Image = true, config.DefaultPoliciesImage
	manifests, err := renderBootstrapManifests(&c.Cluster, true)
	put(t, err)
	want := []string{
		"00-kubelet-bootstrapping-token", "01-csr-approver-role-binding", "01-csr-node-bootstrap", "01-csr-renewal-role-binding",
		"02-administrators", "02-kube-system-sa-role-binding", "05-flannel", "06-network-policies", "06-node-admission", "10-kube-proxy", "11-core-dns", "11-core-dns-svc", "11-kube-config-in-cluster",
	}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(manifests))); diff != "" {
		t.Errorf("manifests (-want +got):\n%s", diff)
	}
	for id, m := range manifests {
		golden(t, "manifests/"+id, m)
		if len(m.Problems) > 0 {
			t.Errorf("%s: %q", id, m.Problems)
		}
		for _, o := range m.Objects {
			if strings.Contains(o.Text("metadata", "name"), "{{") {
				t.Errorf("%s: %s", id, o)
			}
		}
	}
	token := manifests["00-kubelet-bootstrapping-token"].Objects[0]
	if token.Text("stringData", "token-id")+"."+token.Text("stringData", "token-secret") != testToken {
		t.Errorf("the token isn't the cluster's: %v", token)
	}
}

// Parts that the configuration disables aren't rendered, and dual stack is.
func TestManifestChoices(t *testing.T) {
	c := testConfig(t)
	c.Cluster.Network.CNI.Name = config.CNINone // and policies are off, as is the default
	c.Cluster.Proxy.Disabled = true
	c.Cluster.CoreDNS.Disabled = true
	c.Cluster.InlineManifests = []config.InlineManifest{{Name: "mine", Contents: "# nothing\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- {apiVersion: v1, kind: Namespace, metadata: {name: b}}\n"}}
	manifests, err := renderBootstrapManifests(&c.Cluster, true)
	put(t, err)
	for _, id := range []string{"05-flannel", "06-network-policies", "10-kube-proxy", "11-core-dns", "11-core-dns-svc"} {
		if _, there := manifests[id]; there {
			t.Errorf("%s is rendered", id)
		}
	}
	if inline := manifests["20-mine"].Objects; len(inline) != 2 || inline[1].Name() != "b" {
		t.Errorf("inline manifest: %v", inline)
	}

}

// Clusters of both families, and of IPv6 only: what differs from one of IPv4.
func TestFamilies(t *testing.T) {
	four := [2]netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/12")}
	six := [2]netip.Prefix{netip.MustParsePrefix("fd00:10:244::/56"), netip.MustParsePrefix("fd00:10:96::/112")}
	for name, families := range map[string][][2]netip.Prefix{"dualstack": {four, six}, "dualstack-ipv6-first": {six, four}, "ipv6": {six}} {
		c := testConfig(t)
		c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets = nil, nil
		for _, f := range families {
			c.Cluster.Network.PodSubnets = append(c.Cluster.Network.PodSubnets, f[0])
			c.Cluster.Network.ServiceSubnets = append(c.Cluster.Network.ServiceSubnets, f[1])
		}
		manifests, err := renderBootstrapManifests(&c.Cluster, true)
		put(t, err)
		for _, id := range []string{"05-flannel", "10-kube-proxy", "11-core-dns-svc"} {
			golden(t, "manifests/"+name+"/"+id, manifests[id])
		}
		// The kernel's addresses of the node, in networkd's order.
		all := []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("2001:db8::10/64")}
		address := c.Cluster.Network.NodeIPs(all[0].Addr(), all)[0]
		for _, program := range Programs {
			pod, err := staticPod(podInput{program: program, cluster: &c.Cluster, address: address, secretsDir: "/system/secrets/kubernetes", filesDir: "/etc/kubernetes", auditDir: "/var/log/audit/kube"})
			put(t, err)
			if program == scheduler {
				continue // it knows no addresses
			}
			var flags []any
			for _, arg := range pod.List("spec", "containers")[0]["command"].(list) {
				if name, _, _ := strings.Cut(fmt.Sprint(arg), "="); slices.Contains(addressFlags, name) {
					flags = append(flags, arg)
				}
			}
			golden(t, "pods/"+name+"/"+program, flags)
		}
	}
}

// addressFlags are those that depend on the families.
var addressFlags = []string{"--advertise-address", "--bind-address", "--cluster-cidr", "--service-cluster-ip-range"}

// CoreDNS doesn't start if it has no name server to forward to.
func TestCorefileWithoutResolvers(t *testing.T) {
	manifests, err := renderBootstrapManifests(&testConfig(t).Cluster, false)
	put(t, err)
	for _, o := range manifests["11-core-dns"].Objects {
		if got := o.Text("data", "Corefile"); strings.Contains(got, "forward") || strings.Contains(got, "loop") {
			t.Error(got)
		}
	}
}

func TestBadManifests(t *testing.T) {
	for name, spoil := range map[string]func(*config.Cluster){
		"token":     func(c *config.Cluster) { c.Token = "nodot" },
		"no subnet": func(c *config.Cluster) { c.Network.ServiceSubnets = nil },
	} {
		c := testConfig(t)
		spoil(&c.Cluster)
		if _, err := renderBootstrapManifests(&c.Cluster, true); err == nil || strings.Contains(err.Error(), "nodot") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// A document that can't be read keeps nothing else from being made: not the rest of its manifest, not other manifests,
// and not the node's own.
func TestManifestsStandAlone(t *testing.T) {
	t.Parallel()
	own, err := renderBootstrapManifests(&testConfig(t).Cluster, true)
	put(t, err)
	for name, tc := range map[string]struct {
		contents string
		want     string // of the objects
		problem  string
	}{
		"numbers as keys": {`
apiVersion: v1
kind: ConfigMap
metadata: {name: tcp-services, namespace: kube-system}
data:
  9000: "default/echo:8080"
`, `[{"apiVersion":"v1","data":{"9000":"default/echo:8080"},"kind":"ConfigMap","metadata":{"name":"tcp-services","namespace":"kube-system"}}]`, ""},
		"dates and booleans": {`
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: kube-system, annotations: {day: 2024-05-01}}
spec: {hostNetwork: yes, enableServiceLinks: off, containers: [{name: a, image: b}]}
`, `[{"apiVersion":"v1","kind":"Pod","metadata":{"annotations":{"day":"2024-05-01"},"name":"a","namespace":"kube-system"},"spec":{"containers":[{"image":"b","name":"a"}],"enableServiceLinks":false,"hostNetwork":true}}]`, ""},
		"no namespace": {"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: app-settings\ndata:\n  greeting: hello\n",
			`[{"apiVersion":"v1","data":{"greeting":"hello"},"kind":"ConfigMap","metadata":{"name":"app-settings"}}]`, ""},
		"one is wrong": {"{apiVersion: v1, kind: A, metadata: {name: a}}\n---\na: [1\n---\n{apiVersion: v1, kind: B, metadata: {name: b}}\n",
			`[{"apiVersion":"v1","kind":"A","metadata":{"name":"a"}},{"apiVersion":"v1","kind":"B","metadata":{"name":"b"}}]`, "line 3: not valid YAML"},
		"no name": {"kind: Pod", `null`, "line 1: Pod: apiVersion is missing"},
	} {
		c := testConfig(t)
		c.Cluster.InlineManifests = []config.InlineManifest{{Name: "x", Contents: tc.contents}, {Name: "y", Contents: "{apiVersion: v1, kind: Z, metadata: {name: z}}"}}
		all, err := renderBootstrapManifests(&c.Cluster, true)
		put(t, err)
		x, y := all["20-x"], all["20-y"]
		got, err := json.Marshal(x.Objects)
		put(t, err)
		if diff := cmp.Diff(tc.want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if got := strings.Join(x.Problems, "\n"); (got == "") != (tc.problem == "") || !strings.Contains(got, tc.problem) {
			t.Errorf("%s: problems %q, want %q", name, got, tc.problem)
		}
		if len(y.Objects) != 1 || len(y.Problems) > 0 || len(all) != len(own)+2 {
			t.Errorf("%s: another manifest is %v, of %d", name, y, len(all))
		}
	}
}

// S-278: the same pod gives the same file, byte for byte.
func TestPodsAreDeterministic(t *testing.T) {
	c := testConfig(t)
	in := podInput{program: apiServer, cluster: &c.Cluster, address: testAddress}
	var first []byte
	for range 20 {
		pod, err := staticPod(in)
		put(t, err)
		text, err := yaml.Marshal(pod)
		put(t, err)
		if first == nil {
			first = text
		}
		if !bytes.Equal(first, text) {
			t.Fatal("two renderings differ")
		}
	}
}
