package config

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGenerate(t *testing.T) {
	c, err := Generate(Options{
		ClusterName: "dev", Endpoint: "https://10.5.0.2:6443", Hostname: "dev-1", InstallDisk: "/dev/vda", AllowScheduling: true,
		Mirrors: map[string][]string{"*": {"http://10.5.0.1:5000"}}, CertSANs: []string{"localhost", "127.0.0.1"}, Now: testTime,
	})
	if err != nil {
		t.Fatal(err)
	}
	again := roundTrip(t, c)
	c.FillDefaults()
	if !reflect.DeepEqual(c, again) {
		t.Error("what is loaded differs from what was generated")
	}
	data, err := again.Encode()
	if err != nil {
		t.Fatal(err)
	}
	secret := regexp.MustCompile(`(crt|key|token|secret|id): \S+`)
	want := `# A node of a Garboard cluster. It holds secrets: keep it as you keep a private key.
version: v1alpha1
# Keep this document on the node's STATE partition.
persist: true
# What concerns this node alone.
machine:
  type: init
  # Lets a node ask a control plane for certificates.
  token: …
  # Signs the certificates of the machine API.
  ca:
    crt: …
    key: …
  certSANs:
    - localhost
    - 127.0.0.1
  network:
    hostname: dev-1
    autoHostname: auto
    resolver:
      enabled: true
  time:
    servers:
      - pool.ntp.org
    bootTimeout: 30s
  install:
    disk: /dev/vda
  kubelet:
    image: ghcr.io/garboard-os/kubelet:v1.37.2
    clusterDNS:
      - 10.96.0.10
  registries:
    # Asked instead of the registries; '*' is any.
    mirrors:
      '*':
        endpoints:
          - http://10.5.0.1:5000
`
	got, _, _ := strings.Cut(secret.ReplaceAllString(string(data), "$1: …"), "# What all nodes agree about.\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A second node gets the secrets of its cluster, and a worker no private key.
func TestGenerateJoining(t *testing.T) {
	for _, typ := range []MachineType{ControlPlane, Worker} {
		c, _, problems := load(t, document(t, typ))
		if problems != nil {
			t.Fatal(problems)
		}
		s := testSecrets()
		if c.Cluster.Token != s.BootstrapToken || !slices.Equal(c.Cluster.CA.Crt, s.KubernetesCA.Crt) || c.Cluster.ID != "" {
			t.Errorf("%s isn't of the same cluster", typ)
		}
		for name, key := range map[string]KeyPEM{
			"machine": c.Machine.CA.Key, "cluster": c.Cluster.CA.Key, "aggregator": c.Cluster.AggregatorCA.Key, "etcd": c.Cluster.Etcd.CA.Key, "service account": c.Cluster.ServiceAccount.Key,
			"Secrets in etcd": KeyPEM(c.Cluster.Secret),
		} {
			if (len(key) > 0) != typ.ControlPlane() {
				t.Errorf("%s: %s key of %d bytes", typ, name, len(key))
			}
		}
	}
}

func TestGenerateRefuses(t *testing.T) {
	for _, tt := range []struct {
		options Options
		want    string
	}{
		{Options{}, `generate configuration: endpoint "": not an absolute URL such as https://host:port/path`},
		{Options{Endpoint: "https://a:1", Mirrors: map[string][]string{"*": {"x"}}}, `generate configuration: mirror of *: "x": not an absolute URL such as https://host:port/path`},
		{Options{Endpoint: "https://a"}, "cluster.controlPlane.endpoint: lacks the port; did you mean https://a:6443"},
		{Options{Endpoint: "https://a:1", Hostname: "A"}, `machine.network.hostname: "A" must be of lower-case letters`},
	} {
		tt.options.Secrets = testSecrets()
		if c, err := Generate(tt.options); err == nil || c != nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, want %s", err, tt.want)
		}
	}
}

func TestSecretsAreFresh(t *testing.T) {
	seen := map[string]bool{}
	for range 200 {
		for _, s := range []string{string(NewToken()), string(NewKey32())} {
			if seen[s] {
				t.Fatal("made twice")
			}
			seen[s] = true
		}
		if token := NewToken(); !bootstrapToken.MatchString(string(token)) {
			t.Fatalf("token %q", string(token))
		}
	}
}

// What isn't installed by the bootstrap manifests isn't pulled.
func TestImagesOfWhatIsLeftOut(t *testing.T) {
	for image, leave := range map[string]func(*Cluster){
		DefaultProxyImage:   func(c *Cluster) { c.Proxy.Disabled = true },
		DefaultCoreDNSImage: func(c *Cluster) { c.CoreDNS.Disabled = true },
		DefaultFlannelImage: func(c *Cluster) { c.Network.CNI.Name = CNINone },
	} {
		var c Config
		leave(&c.Cluster)
		want := slices.DeleteFunc(DefaultImages(), func(i string) bool { return i == image })
		if got := c.Images(); !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	c := Config{Cluster: Cluster{Network: ClusterNetwork{CNI: CNI{Name: CNICustom}}}}
	if slices.Contains(c.Images(), DefaultFlannelImage) {
		t.Error("flannel with another CNI")
	}
	c = Config{Cluster: Cluster{Network: ClusterNetwork{Policies: true}}}
	if !slices.Contains(c.Images(), DefaultPoliciesImage) {
		t.Error("no agent with policies")
	}
}

func TestDefaultImages(t *testing.T) {
	c, _, _ := load(t, document(t, Init))
	images := DefaultImages()
	used := []string{DefaultPauseImage}
	for _, image := range []string{
		c.Cluster.Etcd.Image, c.Machine.Kubelet.Image, c.Cluster.APIServer.Image, c.Cluster.ControllerManager.Image, c.Cluster.Scheduler.Image,
		c.Cluster.Proxy.Image, c.Cluster.Network.CNI.Flannel.Image, c.Cluster.CoreDNS.Image,
	} {
		if !slices.Contains(images, image) {
			t.Errorf("%s isn't listed", image)
		}
		used = append(used, image)
	}
	for _, image := range images {
		if !imageReference.MatchString(image) || !slices.Contains(used, image) {
			t.Errorf("%s is listed, but malformed or not used", image)
		}
	}
}

func TestDuration(t *testing.T) {
	c, _, _ := load(t, document(t, Init))
	for text, want := range map[string]string{"30s": "30s", "90s": "1m30s", "300s": "5m", "7200s": "2h", "1h0m5s": "1h0m5s", "10m": "10m", "20h": "20h", "1ms": "1ms"} {
		loaded, _, problems := load(t, with(document(t, Worker), "machine", "time: {bootTimeout: "+text+"}"))
		if problems != nil {
			t.Fatal(problems)
		}
		c.Machine.Time.BootTimeout = loaded.Machine.Time.BootTimeout
		data, err := c.Encode()
		if err != nil || !strings.Contains(string(data), "bootTimeout: "+want+"\n") {
			t.Errorf("%s isn't written as %s: %v", text, want, err)
		}
	}
}
