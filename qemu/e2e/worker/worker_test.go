//go:build e2e

// Package worker tests a cluster of two nodes: a worker joins with the
// bootstrap token and runs pods, and pods on different nodes connect to each
// other. Then the worker's network is degraded, and it recovers.
package worker

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget    = 60 * time.Second // for pods on a worker that has to pull their image first
	serviceBudget = 20 * time.Second // for kube-proxy and DNS to know them
	// lostBudget is for Kubernetes to treat a silent node as lost: 50 s
	// (node-monitor-grace-period). Each controller manager counts them itself: one
	// that can't renew its lease for 10 s ends, and the next one begins again.
	lostBudget = 75 * time.Second
	// backBudget is for the kubelet of a node that counted as lost to report its status again.
	// It learns of that from its watch of the Node, which it opens again after up to a minute
	// (defaultBackoffMax and its jitter in client-go's reflector), and checks every ten seconds.
	backBudget = 90 * time.Second
)

// pods are a web server on each node, which serves its name, and a client on
// each. kubectl's proxy is a small HTTP server of files, and kubectl a small
// HTTP client: the image has no shell, and needs none.
const pods = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web, namespace: default}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      containers:
      - name: web
        image: IMAGE
        command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8080, --accept-hosts=.*, --www=/etc/pod, --www-prefix=/pod/]
        readinessProbe: {httpGet: {path: /pod/node, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
        volumeMounts: [{name: pod, mountPath: /etc/pod}]
      volumes:
      - name: pod
        downwardAPI: {items: [{path: node, fieldRef: {fieldPath: "metadata.labels['app']"}}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: plain, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: plain}}
  template:
    metadata: {labels: {app: plain}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: plain, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
`

// named is a name that only the nodes' own resolvers know: CoreDNS asks that of its node.
const named = "machine: {network: {extraHostEntries: [{ip: 10.5.0.2, aliases: [" + host + "]}]}}"

const host = "nas.example.org"

// S-098, S-211, S-219, S-221
func TestWorkerJoins(t *testing.T) {
	c, m := e2etest.Ready(t, "worker", qemu.Container, e2etest.Nodes(1, 1), func(o *qemu.Options) {
		o.Patches = append(o.Patches, []byte(named))
	})
	control, worker := c.Nodes[0], c.Nodes[1]
	c.Apply(strings.ReplaceAll(pods, "IMAGE", config.DefaultAPIServerImage))
	var web map[string]pod
	c.Eventually(podsBudget, "a web pod is ready on each node, and two plain ones on the worker", func() (err error) {
		if web, err = ready(c, "web"); err != nil {
			return err
		}
		if web[control.Name].name == "" || web[worker.Name].name == "" {
			return fmt.Errorf("ready are %v", web)
		}
		plain, err := c.Try("get", "pods", "-l", "app=plain", "--field-selector", "spec.nodeName="+worker.Name+",status.phase=Running", "-o", "name")
		if err == nil && strings.Count(plain, "pod/") != 2 {
			err = fmt.Errorf("on the worker are %q", plain)
		}
		return err
	})
	m.Reached("pods are ready on both")

	for node, p := range web {
		t.Run("on "+node, func(t *testing.T) { works(t, c.In(t), p, web) })
	}
	m.Reached("logs, exec and the network of pods work on both")
	t.Run("S-098 ports", func(t *testing.T) { ports(t, c.In(t), control, worker) })
	t.Run("certificate", func(t *testing.T) { serves(t, c.In(t)) })
	t.Run("taken over", func(t *testing.T) { taken(t, c.In(t), control, worker) })
	t.Run("taints", func(t *testing.T) { tainted(t, c.In(t), worker) })
	t.Run("cut off", func(t *testing.T) { lost(t, c.In(t), worker.Name) })
	t.Run("renewal", func(t *testing.T) { renewed(t, c.In(t), worker) })
	t.Run("tokens end", func(t *testing.T) { ended(t, c.In(t), control, worker) })
	t.Run("its Node is deleted", func(t *testing.T) { nodeDeleted(t, c.In(t), worker) })
}

type pod struct{ name, ip string }

// ready are the ready pods of an app, by node.
func ready(c *e2etest.Cluster, app string) (map[string]pod, error) {
	out, err := c.Try("get", "pods", "-l", "app="+app, "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ NodeName string }
			Status   struct {
				PodIP      string
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, err
	}
	all := map[string]pod{}
	for _, p := range list.Items {
		for _, condition := range p.Status.Conditions {
			if condition.Type == "Ready" && condition.Status == "True" {
				all[p.Spec.NodeName] = pod{p.Metadata.Name, p.Status.PodIP}
			}
		}
	}
	return all, nil
}

// works: logs and exec reach the pod, and it reaches the service, the name
// server and the pods of all nodes.
func works(t *testing.T, c *e2etest.Cluster, from pod, all map[string]pod) {
	if log := c.Kubectl("logs", from.name); !strings.Contains(log, "Starting to serve") {
		t.Errorf("log of %s: %q", from.name, log)
	}
	get := func(url string) error {
		out, err := c.Try("exec", from.name, "--", "/usr/local/bin/kubectl", "--server="+url, "--request-timeout=5s", "get", "--raw", "/pod/node")
		if err == nil && out != "web" {
			err = fmt.Errorf("%s answers %q", url, out)
		}
		return err
	}
	for node, to := range all {
		c.Eventually(serviceBudget, "the pod on "+node+" answers", func() error { return get("http://" + to.ip + ":8080") })
	}
	c.Eventually(serviceBudget, "the service answers by its name", func() error { return get("http://web") })
	c.Eventually(serviceBudget, "a name of the node's resolver has its address", func() error {
		if err := get("http://" + host); err == nil || !strings.Contains(err.Error(), "refused") {
			return fmt.Errorf("a port of it that nobody listens at: %v", err)
		}
		return nil
	})
}

// serves: the worker's kubelet requested its serving certificate from the cluster,
// Garboard approved the request, and it is for the worker's names. The tests of
// logs and exec have shown that it is used: without one, a kubelet shows none.
func serves(t *testing.T, c *e2etest.Cluster) {
	worker := c.Nodes[1]
	out := c.Kubectl("get", "csr", "--field-selector", "spec.signerName=kubernetes.io/kubelet-serving", "-o",
		`jsonpath={range .items[*]}{.spec.username} {.status.conditions[*].type} {.status.conditions[*].reason} {.status.certificate}{"\n"}{end}`)
	// One request, and at most another one, if the kubelet didn't receive the first approval.
	requests := strings.Split(strings.TrimSpace(out), "\n")
	var fields []string
	for _, request := range requests {
		if fields = strings.Fields(request); len(fields) != 4 || len(requests) > 2 || fields[0] != "system:node:"+worker.Name || fields[1] != "Approved" || fields[2] != "GarboardApproved" {
			t.Fatalf("requests: %q", out)
		}
	}
	text, err := base64.StdEncoding.DecodeString(fields[3])
	if err != nil {
		t.Fatal(err)
	}
	cert, err := pki.ParseCert(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(cert.VerifyHostname(worker.Name), cert.VerifyHostname(worker.Address.String())); err != nil {
		t.Error(err)
	}
}

// renewed: the kubelet's client certificate is near its end. The node has it renewed, with a proof, and the kubelet
// runs with the new one.
func renewed(t *testing.T, c *e2etest.Cluster, worker qemu.Node) {
	const budget = 60 * time.Second // for a kubelet to start twice
	file := filepath.Join(c.Dir(), worker.Name, "var", "lib", "kubelet", "pki", "kubelet-client-current.pem")
	crt, key, err := c.Secrets().KubernetesCA.CA().Issue(pki.Leaf{CN: config.NodeUser + worker.Name, Orgs: []string{"system:nodes"}, Client: true, Now: time.Now(), Validity: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, slices.Concat(crt, key), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Gbctl("-n", worker.Name, "service", "kubelet", "restart")
	c.Eventually(budget, "the certificate is renewed", func() error {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		cert, err := pki.ParseCert(text)
		if err == nil && time.Until(cert.NotAfter) < pki.LeafValidity/2 {
			err = fmt.Errorf("it ends at %s", cert.NotAfter)
		}
		return err
	})
	c.Eventually(budget, "the kubelet runs with it", func() error {
		out, err := c.TryGbctl("-n", worker.Name, "service", "kubelet")
		if err == nil && (!strings.Contains(out, "Running") || !strings.Contains(out, "there is another client certificate")) {
			err = errors.New(out)
		}
		return err
	})
	out := c.Kubectl("get", "csr", "--field-selector", "spec.signerName=kubernetes.io/kube-apiserver-client-kubelet", "-o",
		"jsonpath={range .items[?(@.spec.username==\"system:node:"+worker.Name+"\")]}{.status.conditions[0].type} {.status.conditions[0].reason} {.metadata.annotations}{\"\\n\"}{end}")
	approved := 0
	for line := range strings.Lines(out) { // the kubelet itself asks, too, as it starts so near the end; nobody answers
		proven := strings.Contains(line, "garboard.dev/proof")
		if proven && strings.HasPrefix(line, "Approved GarboardApproved ") {
			approved++
		} else if proven || strings.TrimSpace(line) != "" {
			t.Errorf("a request of the node: %s", line)
		}
	}
	if approved != 1 {
		t.Errorf("the requests of the node are %q", out)
	}
}

// lost: a worker that is cut off counts as lost, and is Ready again after the repair.
func lost(t *testing.T, c *e2etest.Cluster, worker string) {
	status := func(want string) func() error {
		return func() error {
			out, err := c.Try("get", "node", worker, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			if err == nil && out != want {
				err = fmt.Errorf("it is %q", out)
			}
			return err
		}
	}
	if err := c.SetNetwork(t.Context(), worker, network.Conditions{Off: true}); err != nil {
		t.Fatal(err)
	}
	off := time.Now()
	c.Eventually(2*lostBudget, "the worker is taken for lost", status("Unknown"))
	taken := time.Now()
	began, err := time.Parse(time.RFC3339, c.Kubectl("get", "lease", "-n", "kube-system", "kube-controller-manager", "-o", "jsonpath={.spec.acquireTime}"))
	if err != nil {
		t.Fatal(err)
	}
	if began.After(off) {
		t.Logf("another controller manager began to count %s after the worker was cut off", began.Sub(off))
		off = began
	}
	if err := eventually.Took(off, taken, lostBudget); err != nil {
		t.Errorf("until the worker was taken for lost: %v", err)
	}
	if err := c.SetNetwork(t.Context(), worker, network.Conditions{}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	c.Eventually(backBudget, "the worker is Ready again", status("True"))
	t.Logf("%7.1fs  until it was Ready again", time.Since(start).Seconds())
}

// nodeDeleted: the Node of a worker that runs is deleted by hand, and comes back with its labels. Meanwhile the worker
// says so.
func nodeDeleted(t *testing.T, c *e2etest.Cluster, worker qemu.Node) {
	const said, back = 30 * time.Second, 2 * time.Minute // it looks each 10 s, and waits for a minute
	address := worker.Address.String()
	c.Gbctl("-n", address, "patch", "mc", "-p", "machine: {kubelet: {nodeLabels: {e2e: label}}}")
	c.Kubectl("delete", "node", worker.Name)
	c.Eventually(said, "health and doctor say that the Node was deleted, and when it comes back", func() error {
		health, err := c.TryGbctl("-n", address, "health")
		doctor, _ := c.TryGbctl("-n", address, "doctor")
		for _, words := range []string{"was deleted from Kubernetes", "registers it again in"} {
			if err == nil || !strings.Contains(health, words) || !strings.Contains(doctor, words) {
				return fmt.Errorf("they say %w:\n%s\n%s", err, health, doctor)
			}
		}
		return nil
	})
	c.Eventually(back, "the Node is back, and Ready", func() error { return c.NodesReady(c.Nodes...) })
	c.Eventually(said, "the worker is healthy, and has its label", func() error {
		label, err := c.Try("get", "node", worker.Name, "-o", "jsonpath={.metadata.labels.e2e}")
		if err == nil && label != "label" {
			err = fmt.Errorf("it has %q", label)
		}
		_, health := c.TryGbctl("-n", address, "health")
		return errors.Join(err, health)
	})
}
