package config

import (
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config/pki"
)

func TestSecretsFile(t *testing.T) {
	s := testSecrets()
	text, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadSecrets("secrets.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, again); diff != "" {
		t.Error(diff)
	}
	// The configuration of a control plane is enough, that of a worker isn't.
	if again, err = LoadSecrets("controlplane.yaml", []byte(document(t, ControlPlane))); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, again); diff != "" {
		t.Error(diff)
	}
	_, err = LoadSecrets("worker.yaml", []byte(document(t, Worker)))
	want := `worker.yaml: machine.ca: is missing, or a part of it: crt and key
worker.yaml: cluster.ca: is missing, or a part of it: crt and key
worker.yaml: cluster.aggregatorCA: is missing, or a part of it: crt and key
worker.yaml: cluster.etcd.ca: is missing, or a part of it: crt and key
worker.yaml: cluster.serviceAccount.key: is missing`
	if err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

func TestLoadSecretsRefuses(t *testing.T) {
	good, err := testSecrets().Encode()
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewSecrets(testTime)
	if err != nil {
		t.Fatal(err)
	}
	s := testSecrets()
	for want, change := range map[string][2]string{
		"cluster.token: must be six":                 {string(s.BootstrapToken), "x"},
		"cluster.secret: must be base64":             {string(s.ClusterSecret), "x"},
		"cluster.ca: not base64":                     {encodePEM(s.KubernetesCA.Key), "???"},
		"machine.ca: private key doesn't belong":     {encodePEM(s.MachineCA.Key), encodePEM(other.MachineCA.Key)},
		"cluster.serviceAccount.key: parse private":  {encodePEM(s.ServiceAccount), encodePEM(s.EtcdCA.Crt)},
		"cluster.etcd.ca: parse certificate: no CER": {encodePEM(s.EtcdCA.Crt), encodePEM(s.EtcdCA.Key)},
		"read secrets s.yaml: yaml":                  {"machine:", "machine: ["},
	} {
		text := strings.ReplaceAll(string(good), change[0], change[1])
		_, err := LoadSecrets("s.yaml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
			continue
		}
		for _, secret := range []string{string(s.MachineToken), encodePEM(s.AggregatorCA.Key)[:40]} {
			if strings.Contains(err.Error(), secret) {
				t.Errorf("%s: the error holds a secret", want)
			}
		}
	}
}

// rsaSecrets are the same for all tests: making them costs a second.
var rsaSecrets = sync.OnceValue(func() *Secrets {
	s, err := NewRSASecrets(testTime)
	if err != nil {
		panic(err)
	}
	return s
})

// S-155
func TestRSASecrets(t *testing.T) {
	s := rsaSecrets()
	for name, want := range map[*CertKey]x509.PublicKeyAlgorithm{&s.MachineCA: x509.Ed25519, &s.KubernetesCA: x509.RSA, &s.EtcdCA: x509.RSA, &s.AggregatorCA: x509.RSA} {
		if cert, err := pki.ParseCert(name.Crt); err != nil || cert.PublicKeyAlgorithm != want {
			t.Errorf("%s: %v, %v", cert.Subject, cert.PublicKeyAlgorithm, err)
		}
	}
	if _, err := Generate(Options{Endpoint: "https://a:6443", Secrets: s}); err != nil {
		t.Error(err)
	}
}

// kubeadmPKI is the folder that kubeadm makes, with the files that matter here.
func kubeadmPKI(t *testing.T) fstest.MapFS {
	t.Helper()
	s := rsaSecrets()
	dir := fstest.MapFS{"sa.key": {Data: s.ServiceAccount}, "sa.pub": {Data: []byte("not read")}}
	for name, pair := range map[string]CertKey{"ca": s.KubernetesCA, "front-proxy-ca": s.AggregatorCA, "etcd/ca": s.EtcdCA} {
		dir[name+".crt"], dir[name+".key"] = &fstest.MapFile{Data: pair.Crt}, &fstest.MapFile{Data: pair.Key}
	}
	return dir
}

func TestKubernetesSecrets(t *testing.T) {
	dir := kubeadmPKI(t)
	s, err := KubernetesSecrets(dir, testTime)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(dir["etcd/ca.key"].Data), string(s.EtcdCA.Key)); diff != "" {
		t.Error(diff)
	}
	if _, err := Generate(Options{Endpoint: "https://a:6443", Secrets: s}); err != nil {
		t.Error(err)
	}

	broken := maps.Clone(dir)
	delete(broken, "sa.key")
	delete(broken, "front-proxy-ca.key")
	delete(broken, "etcd/ca.crt")
	broken["ca.key"] = dir["etcd/ca.key"]
	_, err = KubernetesSecrets(broken, testTime)
	want := `front-proxy-ca.key is missing
etcd/ca.crt is missing
sa.key is missing
ca.crt and .key: private key doesn't belong to certificate "CN=kubernetes,O=kubernetes"`
	if err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
	_, err = KubernetesSecrets(dir, testTime.Add(2*pki.CAValidity))
	if err == nil || !strings.Contains(err.Error(), "etcd/ca.crt has expired on") {
		t.Errorf("got %v", err)
	}
}

// Files that openssl writes, for users of kubeadm with their own authorities.
func TestKubernetesSecretsByOpenSSL(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		return // a second check, if openssl is installed
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(args string) {
		t.Helper()
		cmd := exec.Command(openssl, strings.Fields(args)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("openssl %s: %v\n%s", args, err, out)
		}
	}
	for _, name := range []string{"ca", "front-proxy-ca", "etcd/ca"} {
		run(fmt.Sprintf("req -x509 -newkey rsa:2048 -nodes -keyout %[1]s.key -out %[1]s.crt -subj /CN=own -days 3650", name))
	}
	run("genrsa -traditional -out sa.key 2048")
	s, err := KubernetesSecrets(os.DirFS(dir), testTime)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.EtcdCA.CA().Issue(pki.Leaf{CN: "x", Client: true, Now: testTime}); err != nil {
		t.Error(err)
	}
}

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]struct {
		url       string
		completed bool
	}{
		"https://a.example.org:6443":  {"https://a.example.org:6443", false},
		"https://a.example.org:6443/": {"https://a.example.org:6443", false},
		"https://a.example.org":       {"https://a.example.org:6443", true},
		"a.example.org":               {"https://a.example.org:6443", true},
		"a.example.org:443":           {"https://a.example.org:443", true},
		"10.5.0.2":                    {"https://10.5.0.2:6443", true},
		"10.5.0.2:7443":               {"https://10.5.0.2:7443", true},
		"fd00::1":                     {"https://[fd00::1]:6443", true},
		"[fd00::1]:443":               {"https://[fd00::1]:443", true},
		"https://[fd00::1]:443":       {"https://[fd00::1]:443", false},
	} {
		got, completed, err := ParseEndpoint(text)
		if err != nil || got.String() != want.url || completed != want.completed {
			t.Errorf("%s: %s, %v, %v", text, got, completed, err)
		}
	}
	for text, want := range map[string]string{
		"http://a":      "must be https",
		"":              "must be a host",
		"https://":      "must be a host",
		"a/b":           "must be a host",
		"user@a":        "must be a host",
		"a:0":           `"0" is not a port`,
		"a:99999":       "is not a port",
		"a:x":           "is not a port",
		"https://a:1/x": "is not a port",
	} {
		if got, _, err := ParseEndpoint(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s, %v, want %s", text, got, err, want)
		}
	}
}

//
func TestKubernetesVersion(t *testing.T) {
	for version, tag := range map[string]string{
		"v1.35.4": ":v1.35.4", "1.35.4": ":v1.35.4", "1.36.0": ":v1.36.0", "v1.37.10": ":v1.37.10", "v1.37.0-rc.1": ":v1.37.0-rc.1", "": ":" + KubernetesVersion,
	} {
		c, err := Generate(Options{Endpoint: "https://a:6443", Secrets: testSecrets(), KubernetesVersion: version})
		if err != nil {
			t.Fatal(err)
		}
		for _, image := range []string{c.Machine.Kubelet.Image, c.Cluster.APIServer.Image, c.Cluster.ControllerManager.Image, c.Cluster.Scheduler.Image, c.Cluster.Proxy.Image} {
			if !strings.HasSuffix(image, tag) {
				t.Errorf("%s: %s", version, image)
			}
		}
		if c.Cluster.Etcd.Image != DefaultEtcdImage {
			t.Errorf("etcd is %s", c.Cluster.Etcd.Image)
		}
	}
	for _, version := range []string{"v1.34.0", "v1.38.0", "v1.350.1", "v11.35.4", "latest", "v1.37", "v1.36.3 "} {
		if _, err := Generate(Options{Endpoint: "https://a:6443", Secrets: testSecrets(), KubernetesVersion: version}); err == nil || !strings.Contains(err.Error(), "isn't one that this release runs") {
			t.Errorf("%s: %v", version, err)
		}
	}
}

func TestTokensAreIndependent(t *testing.T) {
	s := testSecrets()
	if s.MachineToken == s.BootstrapToken {
		t.Error("one secret in two places")
	}
	if key, err := base64.StdEncoding.DecodeString(string(s.ClusterSecret)); err != nil || len(key) != keyBytes {
		t.Errorf("%v, %d bytes", err, len(key))
	}
}
