//go:build e2e

// Package joining tests a worker that has joined. Its labels follow the configuration. When
// the control plane that signed its certificate is gone, another one signs the renewal. When
// all of them are gone, the worker's API still answers after a boot, also without the
// certificate.
package joining

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// registerBudget is for a cluster to begin, and for a worker to join it.
	registerBudget = 90 * time.Second
	// labelBudget is for a label of the configuration to be on the node.
	labelBudget = 10 * time.Second
	// taintBudget is for control planes to look at the taints that a worker asks for: each minute.
	taintBudget = 75 * time.Second
	// answerBudget is for a worker to boot, to get its certificate, from the
	// second or third control plane that it asks, and to serve.
	answerBudget = 30 * time.Second
	// answerLost is how long the machine must have stalled for an answer of a
	// control plane to be too late: the worker waits for 10 s.
	answerLost = 5 * time.Second
	// unsignedBudget is for a worker to boot, and to wait in vain for a certificate.
	unsignedBudget = 2 * time.Minute
	// left is the rest of a certificate's year when the worker comes back: it is due for renewal.
	left = pki.RenewBefore / 2
)

// fingerprint matches that of the worker's certificate on the console.
var fingerprint = regexp.MustCompile(`[0-9A-F]{2}(:[0-9A-F]{2}){31}`)

func TestWorkerAndItsPeers(t *testing.T) {
	c, m := e2etest.Start(t, "joining", qemu.Container, e2etest.Nodes(3, 1), func(o *qemu.Options) {
		o.WorkerPatches = [][]byte{[]byte(`{"machine": {"kubelet": {"nodeTaints": {"example.org/dock": "dry:NoSchedule"}}}}`)}
	})
	m.Reached("power is on")
	worker := c.Nodes[3]
	registered(c, worker, "example.org/dock=dry:NoSchedule")
	m.Reached("the worker has registered, with its taint")
	c.Ready(m)
	if out := taints(c, c.Nodes[0]); strings.Contains(out, "example.org/dock") {
		t.Errorf("a control plane has the worker's taint: %s", out)
	}
	kept := keptFile(c, worker)
	c.Eventually(answerBudget, "the worker serves, and has kept its certificate", func() error {
		if _, err := os.Stat(kept); err != nil {
			return err
		}
		_, err := c.TryGbctl("-n", worker.Address.String(), "version")
		return err
	})
	m.Reached("the worker's machine API serves")
	c.Eventually(registerBudget, "the worker knows three API servers", func() error { return c.KnowsServers(worker, c.Nodes[:3]...) })
	m.Reached("the worker knows three API servers")

	t.Run("logs", func(t *testing.T) { logs(t, c.In(t)) })
	// S-221
	t.Run("labels", func(t *testing.T) { labels(t, c.In(t), worker) })
	m.Reached("labels follow the configuration")

	signer := signedBy(t, c, worker)
	t.Run("who signed dies", func(t *testing.T) {
		c := c.In(t)
		if err := c.Cut(t.Context(), signer.Name); err != nil {
			t.Fatal(err)
		}
		old := shorten(t, c, read(t, kept))
		began := reboot(t, c, worker, func() error { return os.WriteFile(kept, slices.Concat([]byte(old.Crt), []byte(old.Key)), 0o600) })
		c.Eventually(answerBudget, "the worker has a certificate of another control plane", func() error {
			if bytes.Equal(read(t, kept).Crt, old.Crt) {
				return errors.New("it has the old one")
			}
			return nil
		})
		t.Logf("%7.1fs  from power on to a certificate of another one, %s being dead", time.Since(began).Seconds(), signer.Name)
		signedBy(t, c, worker, signer.Name)
	})
	m.Reached("another control plane signed")

	// S-157
	second := signedBy(t, c, worker, signer.Name)
	t.Run("who signed last dies", func(t *testing.T) { renews(t, c.In(t), worker, signer, second) })
	m.Reached("the last control plane renewed")

	t.Run("all are dead", func(t *testing.T) {
		c := c.In(t)
		for _, n := range c.Nodes[:3] {
			if n.Name == signer.Name || n.Name == second.Name {
				continue // it is down already
			}
			if err := c.Cut(t.Context(), n.Name); err != nil {
				t.Fatal(err)
			}
		}
		began := reboot(t, c, worker, func() error { return nil })
		c.Eventually(answerBudget, "the worker answers", func() error {
			_, err := c.TryGbctl("-n", worker.Address.String(), "get", "apiservers")
			return err
		})
		t.Logf("%7.1fs  from power on to an answer, with all control planes dead", time.Since(began).Seconds())
		withoutCertificate(t, c, worker, kept)
	})
}

// withoutCertificate: a worker that kept nothing, and for which nobody signs, still takes a
// configuration from its administrator, who compares the fingerprint on the console.
func withoutCertificate(t *testing.T, c *e2etest.Cluster, worker qemu.Node, kept string) {
	console := func() string {
		data, err := os.ReadFile(c.Console(worker.Name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	before := len(console())
	reboot(t, c, worker, func() error { return os.Remove(kept) })
	said := ""
	c.Eventually(unsignedBudget, "the worker's console shows a fingerprint", func() error {
		_, said, _ = strings.Cut(console()[before:], "no control plane has signed the certificate of the API yet: API at ")
		if !strings.Contains(said, "-f FILE\n") {
			return errors.New("not yet")
		}
		return nil
	})
	print := fingerprint.FindString(said)
	node := worker.Address.String()
	if out, err := c.TryGbctl("-n", node, "version"); err == nil || !strings.Contains(err.Error(), "self-signed") {
		t.Errorf("it is believed without its fingerprint: %v: %s", err, out)
	}
	if out, err := c.TryGbctl("--garboardconfig", anonymous(t, c), "-n", node, "version", "--insecure", "--fingerprint", print); err == nil || !strings.Contains(err.Error(), "requires a certificate") {
		t.Errorf("it serves anybody: %v: %s", err, out)
	}
	c.Gbctl("-n", node, "version", "--insecure", "--fingerprint", print)
	data, err := os.ReadFile(c.Configuration(worker.Name))
	if err != nil {
		t.Fatal(err)
	}
	changed := filepath.Join(t.TempDir(), "changed.yaml")
	data = bytes.Replace(data, []byte("\n  kubelet:\n"), []byte("\n  kubelet:\n    nodeLabels:\n      example.org/corrected: \"yes\"\n"), 1)
	if err := os.WriteFile(changed, data, 0o600); err != nil {
		t.Fatal(err)
	}
	c.Gbctl("-n", node, "apply-config", "--insecure", "--fingerprint", print, "-f", changed)
	c.Eventually(answerBudget, "the worker has the new configuration", func() error {
		data, err := os.ReadFile(filepath.Join(c.Dir(), worker.Name, "state", "config.yaml"))
		if err == nil && !strings.Contains(string(data), "example.org/corrected") {
			err = errors.New("it has another one")
		}
		return err
	})
}

// anonymous is the file with a client configuration that has no certificate.
func anonymous(t *testing.T, c *e2etest.Cluster) string {
	t.Helper()
	data, err := os.ReadFile(c.ClientConfig())
	if err != nil {
		t.Fatal(err)
	}
	without := regexp.MustCompile(`(?m)^ *(crt|key): .*\n`).ReplaceAll(data, nil)
	if len(without) == len(data) {
		t.Fatal("there is no certificate in the client configuration")
	}
	file := filepath.Join(t.TempDir(), "anonymous")
	if err := os.WriteFile(file, without, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// registered waits for a node, which must have a taint of its configuration
// from the start: a pod that is scheduled before the taint would stay.
func registered(c *e2etest.Cluster, n qemu.Node, taint string) {
	c.T().Helper()
	out := ""
	c.Eventually(registerBudget, n.Name+" registers", func() (err error) {
		out, err = c.Try("get", "node", n.Name, "-o", taintsPath)
		return err
	})
	if !strings.Contains(out, taint+" ") {
		c.T().Errorf("%s has the taints %q when it is seen first, not %s", n.Name, out, taint)
	}
}

const taintsPath = `jsonpath={range .spec.taints[*]}{.key}={.value}:{.effect} {end}`

func taints(c *e2etest.Cluster, n qemu.Node) string {
	c.T().Helper()
	return c.Kubectl("get", "node", n.Name, "-o", taintsPath)
}

// renews: a worker that was off for most of a year serves with its old
// certificate, and renews it. The control plane that signed that is down, and
// with it etcd's quorum and Kubernetes. Clocks of containers can't be set, so
// the test makes an older certificate, with the authority's key.
func renews(t *testing.T, c *e2etest.Cluster, worker, first, second qemu.Node) {
	last := c.Nodes[slices.IndexFunc(c.Nodes[:3], func(n qemu.Node) bool { return n.Name != first.Name && n.Name != second.Name })]
	before := signatures(c, last, worker)
	// After the end of the first one, the others may not have published their addresses for some time.
	c.Eventually(registerBudget, "the worker knows both that are left", func() error { return c.KnowsServers(worker, second, last) })
	if err := c.Cut(t.Context(), second.Name); err != nil {
		t.Fatal(err)
	}
	kept := keptFile(c, worker)
	was := read(t, kept)
	old := shorten(t, c, was)
	began := reboot(t, c, worker, func() error { return os.WriteFile(kept, slices.Concat([]byte(old.Crt), []byte(old.Key)), 0o600) })
	var now config.CertKey
	c.Eventually(answerBudget, "the worker has a new certificate", func() error {
		if now = read(t, kept); bytes.Equal(now.Crt, old.Crt) {
			return errors.New("it has the old one")
		}
		return nil
	})
	t.Logf("%7.1fs  from power on to a renewal by another one, %s being dead", time.Since(began).Seconds(), second.Name)
	if cert := parse(t, now.Crt); !bytes.Equal(now.Key, old.Key) || time.Until(cert.NotAfter) < pki.LeafValidity-time.Hour {
		t.Errorf("it is for another key, or ends on %s", cert.NotAfter)
	}
	c.Eventually(answerBudget, "the worker serves with it", func() error {
		_, err := c.TryGbctl("-n", worker.Address.String(), "version")
		return err
	})
	// Once more if the machine has stalled, and the worker didn't wait for the first answer.
	signed, again := signatures(c, last, worker), eventually.Lost(began, time.Now()) >= answerLost
	if signed != before+1 && !(again && signed == before+2) {
		t.Errorf("%s has signed %d times, and had %d times", last.Name, signed, before)
	}
	// The negative twin: a certificate that isn't due isn't renewed.
	reboot(t, c, worker, func() error { return nil })
	c.Eventually(answerBudget, "the worker serves after a boot", func() error {
		_, err := c.TryGbctl("-n", worker.Address.String(), "version")
		return err
	})
	if n := signatures(c, last, worker); n != signed || !bytes.Equal(read(t, kept).Crt, now.Crt) {
		t.Errorf("%s has signed %d times, and had %d times", last.Name, n, signed)
	}
}

// keptFile is where a worker stores its certificate and the key.
func keptFile(c *e2etest.Cluster, worker qemu.Node) string {
	return filepath.Join(c.Dir(), worker.Name, "state", "machine-api.pem")
}

func read(t *testing.T, path string) config.CertKey {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block, key := pem.Decode(data)
	return config.CertKey{Crt: pem.EncodeToMemory(block), Key: key}
}

func parse(t *testing.T, crt []byte) *x509.Certificate {
	t.Helper()
	cert, err := pki.ParseCert(crt)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// shorten makes the same certificate with less of its validity left.
func shorten(t *testing.T, c *e2etest.Cluster, have config.CertKey) config.CertKey {
	t.Helper()
	cert := parse(t, have.Crt)
	leaf := pki.Leaf{CN: cert.Subject.CommonName, DNS: cert.DNSNames, Server: true, Now: time.Now(), Validity: left}
	for _, ip := range cert.IPAddresses {
		addr, _ := netip.AddrFromSlice(ip)
		leaf.IPs = append(leaf.IPs, addr.Unmap())
	}
	crt, err := c.Secrets().MachineCA.CA().Sign(cert.PublicKey, leaf)
	if err != nil {
		t.Fatal(err)
	}
	return config.CertKey{Crt: crt, Key: have.Key}
}

// reboot turns the worker off, calls meanwhile, and turns it on.
func reboot(t *testing.T, c *e2etest.Cluster, worker qemu.Node, meanwhile func() error) (on time.Time) {
	t.Helper()
	if err := c.Off(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	if err := meanwhile(); err != nil {
		t.Fatal(err)
	}
	on = time.Now()
	if err := c.On(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	return on
}

// signedBy is the control plane whose trustd signed for the worker, by its log,
// without those that are down.
func signedBy(t *testing.T, c *e2etest.Cluster, worker qemu.Node, dead ...string) qemu.Node {
	t.Helper()
	for _, n := range c.Nodes[:3] {
		if strings.Contains(strings.Join(dead, " "), n.Name) {
			continue
		}
		if signatures(c, n, worker) > 0 {
			return n
		}
	}
	t.Fatal("no trustd says that it has signed")
	return qemu.Node{}
}

// signatures is how often a control plane has signed for the worker.
func signatures(c *e2etest.Cluster, by, worker qemu.Node) int {
	return strings.Count(c.Gbctl("-n", by.Address.String(), "logs", "trustd"), "signed name="+worker.Name)
}

// logs of pods on every node can be read: the API server trusts all kubelets' certificates.
func logs(t *testing.T, c *e2etest.Cluster) {
	for _, n := range c.Nodes {
		c.Eventually(labelBudget, "the kubelet of "+n.Name+" shows a log", func() error {
			pod, err := c.Try("get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-proxy", "--field-selector", "spec.nodeName="+n.Name, "-o", "name")
			if err == nil {
				_, err = c.Try("logs", "-n", "kube-system", strings.TrimSpace(pod))
			}
			return err
		})
	}
}

// labels and taints of the configuration are added and removed while the node runs. The worker has registered with
// another one.
func labels(t *testing.T, c *e2etest.Cluster, worker qemu.Node) {
	for _, n := range []qemu.Node{worker, c.Nodes[2]} {
		patch := func(text string) { c.Gbctl("-n", n.Address.String(), "patch", "mc", "--patch", text) }
		has := func(want string) func() error {
			return func() error {
				out, err := c.Try("get", "node", n.Name, "-o", `jsonpath={.metadata.labels.example\.org/rack} {.spec.taints[?(@.key=="example.org/gpu")].effect} {.spec.taints[?(@.key=="example.org/dock")].effect}`)
				if err == nil && strings.TrimSpace(out) != want {
					err = fmt.Errorf("it has %q", out)
				}
				return err
			}
		}
		budget := labelBudget
		if n.Name == worker.Name {
			budget = taintBudget
		}
		patch(`[{"op": "add", "path": "/machine/kubelet/nodeLabels", "value": {"example.org/rack": "r12"}}, {"op": "add", "path": "/machine/kubelet/nodeTaints", "value": {"example.org/gpu": "NoSchedule"}}]`)
		c.Eventually(budget, n.Name+" has its label and its taint, and no other one", has("r12 NoSchedule"))
		patch(`[{"op": "remove", "path": "/machine/kubelet/nodeLabels"}, {"op": "remove", "path": "/machine/kubelet/nodeTaints"}]`)
		c.Eventually(budget, n.Name+" hasn't them any more", has(""))
	}
}
