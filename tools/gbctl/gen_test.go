package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

var genTime = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// shell runs commands in a folder of its own, as a person does.
type shell struct {
	t   *testing.T
	now time.Time
}

func newShell(t *testing.T) *shell {
	t.Helper()
	t.Chdir(t.TempDir())
	return &shell{t, genTime}
}

// try runs `gen` with args.
func (s *shell) try(args ...string) (string, error) {
	cmd := (&generator{now: func() time.Time { return s.now }}).command()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.Execute()
	return out.String(), err
}

func (s *shell) run(line string) string {
	s.t.Helper()
	out, err := s.try(strings.Fields(line)...)
	if err != nil {
		s.t.Fatalf("gen %s: %v", line, err)
	}
	return out
}

// refused runs what must fail, saying want.
func (s *shell) refused(line, want string, code int) {
	s.t.Helper()
	out, err := s.try(strings.Fields(line)...)
	if err == nil || !strings.Contains(err.Error(), want) || exitCode(err) != code {
		s.t.Errorf("gen %s: %v (exit code %d), want %s (%d)\n%s", line, err, exitCode(err), want, code, out)
	}
}

func (s *shell) read(name string) []byte {
	s.t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		s.t.Fatal(err)
	}
	return data
}

func (s *shell) cert(name string) *x509.Certificate {
	s.t.Helper()
	cert, err := pki.ParseCert(s.read(name))
	if err != nil {
		s.t.Fatal(err)
	}
	return cert
}

// modes are the files that there are, with their permissions.
func (s *shell) modes(dir string) map[string]fs.FileMode {
	s.t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		s.t.Fatal(err)
	}
	modes := map[string]fs.FileMode{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			s.t.Fatal(err)
		}
		modes[e.Name()] = info.Mode().Perm()
	}
	return modes
}

// The guide's commands, letter by letter: a pair for an administrator, and a new
// certificate for the same key once the first one has expired.
func TestS150AdministratorPair(t *testing.T) {
	s := newShell(t)
	s.run("ca")
	s.run("key --name admin")
	s.run("csr --key admin.key --ip 127.0.0.1")
	out := s.run("crt --ca ca --csr admin.csr --name admin")
	want := "wrote admin.crt: admin, os:admin, valid until 2027-05-01\nnext: set it as crt in the client configuration: base64 -w0 admin.crt\n"
	if diff := cmp.Diff(want, out); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]fs.FileMode{"ca.crt": 0o644, "ca.key": 0o600, "admin.key": 0o600, "admin.csr": 0o644, "admin.crt": 0o644}, s.modes(".")); diff != "" {
		t.Error(diff)
	}
	s.verify("admin.crt")

	// S-153: what is left after two years is the authority and the key.
	key := s.read("admin.key")
	s.now = genTime.Add(2 * 365 * 24 * time.Hour)
	s.run("csr --key admin.key --ip 127.0.0.1")
	s.run("crt --ca ca --csr admin.csr --name admin")
	s.verify("admin.crt")
	if !bytes.Equal(key, s.read("admin.key")) {
		t.Error("the key was replaced")
	}

	// The authority may come from a node's configuration (S-154).
	s.run("config home 10.5.0.2")
	for _, file := range []string{"controlplane.yaml", "init.yaml"} {
		s.run("crt --ca " + file + " --csr admin.csr --name admin --hours 1")
		if cert := s.cert("admin.crt"); !cert.NotAfter.Equal(s.now.Add(time.Hour)) {
			t.Errorf("%s: valid until %s", file, cert.NotAfter)
		}
	}
	s.refused("crt --ca worker.yaml --csr admin.csr --name admin", "machine.ca: is missing", codeFailed)
}

// verify is that a machine API would let the certificate in as an administrator's.
func (s *shell) verify(name string) {
	s.t.Helper()
	cert := s.cert(name)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.read("ca.crt"))
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: s.now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		s.t.Errorf("%s: %v", name, err)
	}
	if cert.Subject.CommonName != "admin" || !slices.Equal(cert.Subject.Organization, []string{"os:admin"}) || len(cert.IPAddresses) != 1 {
		s.t.Errorf("%s: %s %v", name, cert.Subject, cert.IPAddresses)
	}
	if openssl, err := exec.LookPath("openssl"); err == nil {
		if out, err := exec.Command(openssl, "verify", "-no_check_time", "-purpose", "sslclient", "-CAfile", "ca.crt", name).CombinedOutput(); err != nil {
			s.t.Errorf("openssl verify: %v\n%s", err, out)
		}
	}
}

// S-155
func TestGenAlgorithms(t *testing.T) {
	for flag, want := range map[string]any{"": ed25519.PrivateKey{}, " --rsa": &rsa.PrivateKey{}, " --ecdsa": &ecdsa.PrivateKey{}} {
		s := newShell(t)
		s.run("key --name x" + flag)
		s.run("ca --organization kubernetes --hours 24 --name k" + flag)
		for _, file := range []string{"x.key", "k.key"} {
			key, err := pki.ParseKey(s.read(file))
			if err != nil {
				t.Fatal(err)
			}
			if got, want := typeName(key), typeName(want); got != want {
				t.Errorf("%q: %s is %s, want %s", flag, file, got, want)
			}
		}
		s.run("csr --key x.key --roles=os:reader,os:etcd:backup --name watcher --dns w.example.org")
		s.run("crt --ca k --csr x.csr --name x")
		cert, ca := s.cert("x.crt"), s.cert("k.crt")
		if !ca.NotAfter.Equal(genTime.Add(24*time.Hour)) || !cert.NotAfter.Equal(ca.NotAfter) {
			t.Errorf("%q: authority until %s, certificate until %s", flag, ca.NotAfter, cert.NotAfter)
		}
		if cert.Subject.CommonName != "watcher" || !slices.Equal(cert.Subject.Organization, []string{"os:reader", "os:etcd:backup"}) || !slices.Equal(cert.DNSNames, []string{"w.example.org"}) {
			t.Errorf("%q: %s %v", flag, cert.Subject, cert.DNSNames)
		}
	}
}

func typeName(v any) string {
	switch v.(type) {
	case ed25519.PrivateKey:
		return "Ed25519"
	case *rsa.PrivateKey:
		return "RSA"
	case *ecdsa.PrivateKey:
		return "ECDSA"
	}
	return "unknown"
}

// A key is never overwritten, nor a certificate that isn't for the same key.
func TestGenKeepsFiles(t *testing.T) {
	s := newShell(t)
	s.run("ca")
	s.run("key --name admin")
	s.run("csr --key admin.key")
	s.run("crt --ca ca --csr admin.csr --name admin")
	s.refused("ca", "because these files exist: ca.crt, ca.key", codeRefused)
	s.refused("key --name admin", "because these files exist: admin.key", codeRefused)
	s.refused("crt --ca ca --csr admin.csr --name ca", "because these files exist: ca.crt", codeRefused)
	s.run("key --name other")
	s.run("csr --key other.key")
	s.refused("crt --ca ca --csr other.csr --name admin", "because these files exist: admin.crt", codeRefused)
	before := s.read("admin.key")
	s.run("key --name admin --force")
	if bytes.Equal(before, s.read("admin.key")) {
		t.Error("--force didn't overwrite")
	}
}

func TestGenRefuses(t *testing.T) {
	s := newShell(t)
	s.run("ca")
	s.run("key --name admin")
	s.run("csr --key admin.key")
	s.refused("csr --key admin.key --roles os:amin", `unknown role "os:amin"; the roles are os:admin, os:operator`, codeUsage)
	s.refused("csr --key admin.key --ip 127.0.0", "is not an address", codeUsage)
	s.refused("csr --key none.key", "no such file", codeFailed)
	s.refused("csr --key ca.crt", "no PRIVATE KEY block", codeFailed)
	s.refused("crt --ca none --csr admin.csr --name x", "--ca none reads none.crt and none.key", codeFailed)
	s.refused("crt --ca ca --csr admin.key --name x", "no CERTIFICATE REQUEST block", codeFailed)
	s.refused("crt --ca ca --csr admin.csr --name x --hours 0", "--hours must be", codeUsage)
	s.refused("crt --ca ca --csr admin.csr", `required flag(s) "name" not set`, codeFailed)
	s.refused("kye", `unknown command "kye"`, codeFailed)
	s.refused("key --name x --rsa --ecdsa", "none of the others can be", codeFailed)
	s.now = genTime.Add(2 * pki.CAValidity)
	s.refused("crt --ca ca --csr admin.csr --name x", "has expired on", codeFailed)
}

func TestGenSecrets(t *testing.T) {
	s := newShell(t)
	s.run("secrets")
	s.refused("secrets", "because these files exist: secrets.yaml", codeRefused)
	if mode := s.modes(".")["secrets.yaml"]; mode != 0o600 {
		t.Errorf("mode %s", mode)
	}
	s.run("config a 10.5.0.2 --with-secrets secrets.yaml --output-dir a")
	s.run("config a 10.5.0.2 --with-secrets a/controlplane.yaml --output-dir b")
	for _, file := range []string{"init.yaml", "controlplane.yaml", "worker.yaml"} {
		if diff := cmp.Diff(string(s.read("a/"+file)), string(s.read("b/"+file))); diff != "" {
			t.Errorf("the same secrets make another %s:\n%s", file, diff)
		}
	}
	s.refused("config a 10.5.0.2 --with-secrets b/worker.yaml --output-dir c", "b/worker.yaml: cluster.etcd.ca: is missing", codeRefused)
}

func TestGenSecretsFromKubernetes(t *testing.T) {
	s := newShell(t)
	if err := os.MkdirAll("pki/etcd", 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca", "front-proxy-ca"} {
		s.run("ca --rsa --organization kubernetes --name pki/" + name)
	}
	s.refused("secrets --from-kubernetes-pki pki", "secrets from pki:\netcd/ca.crt is missing\netcd/ca.key is missing\nsa.key is missing", codeRefused)
	s.run("ca --rsa --organization etcd --name pki/etcd/ca")
	s.run("key --rsa --name pki/sa")
	s.run("secrets --from-kubernetes-pki pki -o taken.yaml")
	s.run("config old 10.5.0.2 --with-secrets taken.yaml")
	c, _, err := config.Load("init.yaml", s.read("init.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(c.Cluster.Etcd.CA.Crt, s.read("pki/etcd/ca.crt")) || !bytes.Equal(c.Cluster.ServiceAccount.Key, s.read("pki/sa.key")) {
		t.Error("not the authorities that were there")
	}
	if c.Cluster.Secret != "" {
		t.Error("Secrets would be encrypted, and the API servers that are there couldn't read them")
	}
}

// S-003, S-004, S-041: what gen config writes is complete, loads, and is kept.
func TestS041Config(t *testing.T) {
	s := newShell(t)
	out := s.run("config home home.example.org --install-disk /dev/sda --output-dir out --additional-sans a.example.org,192.0.2.1 --registry-mirror *=https://10.5.0.1:5000 --registry-mirror *=https://10.5.0.1:5001 --kubernetes-version 1.35.1")
	want := `endpoint is https://home.example.org:6443
wrote
  out/init.yaml          for the first control plane, which forms the cluster
  out/controlplane.yaml  for all other control planes
  out/worker.yaml        for workers
  out/garboardconfig     your access to the cluster, valid until 2027-05-01
The files contain the secrets of the cluster: protect them like private keys.
next: boot a machine, apply its configuration, and check its health
  gbctl apply-config --insecure -n ADDRESS -f out/init.yaml
  export GARBOARDCONFIG=out/garboardconfig
  gbctl -n ADDRESS health
`
	if diff := cmp.Diff(want, out); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]fs.FileMode{"init.yaml": 0o600, "controlplane.yaml": 0o600, "worker.yaml": 0o600, "garboardconfig": 0o600}, s.modes("out")); diff != "" {
		t.Error(diff)
	}
	for file, typ := range map[string]config.MachineType{"init.yaml": config.Init, "controlplane.yaml": config.ControlPlane, "worker.yaml": config.Worker} {
		c, warnings, err := config.Load(file, s.read("out/"+file))
		if err != nil || len(warnings) > 0 {
			t.Fatal(warnings, err)
		}
		if c.Machine.Type != typ || c.Cluster.Name != "home" || c.Machine.Install.Disk != "/dev/sda" || slices.Contains(c.Machine.CertSANs, "192.0.2.1") != typ.ControlPlane() ||
			!strings.HasSuffix(c.Machine.Kubelet.Image, ":v1.35.1") || len(c.Machine.Registries.Mirrors["*"].Endpoints) != 2 {
			t.Errorf("%s: %+v", file, c.Machine)
		}
		if hasKey := len(c.Machine.CA.Key) > 0; hasKey != typ.ControlPlane() {
			t.Errorf("%s: authority's key %v", file, hasKey)
		}
	}
	s.checkAccess("out/garboardconfig", "out/init.yaml")
	before := s.read("out/init.yaml")
	if err := os.Remove("out/controlplane.yaml"); err != nil {
		t.Fatal(err)
	}
	s.refused("config home home.example.org --output-dir out", "because these files exist: out/init.yaml, out/worker.yaml, out/garboardconfig", codeRefused)
	if _, err := os.Stat("out/controlplane.yaml"); err == nil || !bytes.Equal(before, s.read("out/init.yaml")) {
		t.Error("something was written in spite of what was in the way")
	}
	s.run("config home home.example.org --output-dir out --force")
}

// checkAccess is that the client configuration fits the machine that has document.
func (s *shell) checkAccess(file, document string) {
	s.t.Helper()
	c, err := client.Load(file)
	if err != nil {
		s.t.Fatal(err)
	}
	context, err := c.Current("")
	if err != nil {
		s.t.Fatal(err)
	}
	_, pair, err := context.Credentials()
	if err != nil {
		s.t.Fatal(err)
	}
	machine, _, err := config.Load(document, s.read(document))
	if err != nil {
		s.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(machine.Machine.CA.Crt)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: s.now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		s.t.Error(err)
	}
	if ca, err := base64.StdEncoding.DecodeString(context.CA); err != nil || !bytes.Equal(ca, machine.Machine.CA.Crt) {
		s.t.Errorf("another authority, %v", err)
	}
	if !slices.Equal(pair.Leaf.Subject.Organization, []string{"os:admin"}) || !slices.Equal(context.Endpoints, []string{machine.Cluster.ControlPlane.Endpoint.Hostname()}) {
		s.t.Errorf("%s at %v", pair.Leaf.Subject, context.Endpoints)
	}
}

func TestGenConfigPatches(t *testing.T) {
	s := newShell(t)
	if err := os.WriteFile("worker-patch.yaml", []byte("machine:\n  kubelet:\n    nodeLabels: {disk: fast}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.try("config", "home", "10.5.0.2", "--config-patch", "{machine: {time: {servers: [ntp.example.org]}}}",
		"--config-patch-control-plane", `[{"op": "add", "path": "/cluster/allowSchedulingOnControlPlanes", "value": true}]`, "--config-patch-worker", "@worker-patch.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"init.yaml", "controlplane.yaml", "worker.yaml"} {
		c, _, err := config.Load(file, s.read(file))
		if err != nil {
			t.Fatal(err)
		}
		worker := c.Machine.Type == config.Worker
		if !slices.Equal(c.Machine.Time.Servers, []string{"ntp.example.org"}) || c.Cluster.AllowSchedulingOnControlPlanes == worker || (c.Machine.Kubelet.NodeLabels["disk"] == "fast") != worker {
			t.Errorf("%s: %v %v %v", file, c.Machine.Time, c.Cluster.AllowSchedulingOnControlPlanes, c.Machine.Kubelet.NodeLabels)
		}
		if !bytes.Contains(s.read(file), []byte("# Lets a kubelet join.")) {
			t.Errorf("%s: the comments are gone", file)
		}
	}
	_, err = s.try("config", "home", "10.5.0.2", "--output-dir", "x", "--config-patch", "{machine: {timer: 3}}")
	if err == nil || !strings.Contains(err.Error(), "init.yaml, patched") || !strings.Contains(err.Error(), "machine.timer") || exitCode(err) != codeRefused {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat("x"); err == nil {
		t.Error("something was written")
	}
}

// S-042, S-155, S-197: the older format.
func TestS042SelfHosted(t *testing.T) {
	s := newShell(t)
	s.run("config old 10.5.0.2 --compat=self-hosted")
	if files := s.modes("."); len(files) != 4 || files["join.yaml"] != 0o600 {
		t.Errorf("wrote %v", files)
	}
	for _, file := range []string{"init.yaml", "controlplane.yaml", "join.yaml"} {
		text := string(s.read(file))
		for _, unknown := range []string{"aggregatorCA", "serviceAccount"} {
			if strings.Contains(text, unknown) {
				t.Errorf("%s has %s", file, unknown)
			}
		}
		if file == "join.yaml" {
			if !strings.Contains(text, "type: join\n") {
				t.Error("the worker's type isn't join")
			}
			if _, _, err := config.Load(file, []byte(text)); err != nil {
				t.Error(err)
			}
		}
	}
	s.run("secrets")
	s.refused("config old 10.5.0.2 --compat=self-hosted --with-secrets secrets.yaml --output-dir x", "is ECDSA; --compat=self-hosted needs RSA", codeRefused)
	s.refused("config old 10.5.0.2 --compat=v0.8 --output-dir x", "the only other format is self-hosted", codeUsage)
}

func TestGenConfigRefuses(t *testing.T) {
	s := newShell(t)
	s.refused("config home http://10.5.0.2:6443", "must be https", codeUsage)
	s.refused("config Home! 10.5.0.2", "cluster.clusterName", codeRefused)
	s.refused("config home 10.5.0.2 --registry-mirror x", "must be HOST=URL", codeUsage)
	s.refused("config home 10.5.0.2 --registry-mirror x=y", `mirror of x: "y"`, codeRefused)
	s.refused("config home 10.5.0.2 --kubernetes-version v1.20.5", "isn't one that this release runs", codeRefused)
	s.refused("config home 10.5.0.2 --install-disk sda", "machine.install.disk", codeRefused)
	s.refused("config home 10.5.0.2 --additional-sans a_b!", "certSANs", codeRefused)
	s.refused(`config home 10.5.0.2 --config-patch {"machine":{"install":{"image":"registry.example/installer"}}}`, "lacks a tag or a digest", codeRefused)
	s.refused("config home 10.5.0.2 --config-patch @none.yaml", "no such file", codeRefused)
	s.refused("config home", "accepts 2 arg(s)", codeFailed)
	if left, _ := filepath.Glob("*"); len(left) > 0 {
		t.Errorf("wrote %v", left)
	}
}
