//go:build e2e && long

// Package adopt tests docs/adopting-kubeadm.md: a cluster made by kubeadm gets control
// planes of Garboard, one after the other, and loses its old one, while it is used. A
// control plane that has the secrets of another cluster reports this and does not join.
package adopt

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// joinBudget is for a node to boot, to join, and to be promoted.
	joinBudget = 60 * time.Second
	// serveBudget is for its API server to be ready after that.
	serveBudget = 60 * time.Second
	podsBudget  = 90 * time.Second
	// goneBudget is for the end of the lease of an API server that has ended: 15 s.
	goneBudget = 40 * time.Second

	// silence is the longest time without a successful write: an election of etcd
	// takes a second or two, and a client that was cut off tries again.
	silence = 15 * time.Second
)

var (
	network      = netip.MustParsePrefix("10.5.0.0/24") // qemu's default
	oldAddress   = netip.MustParseAddr("10.5.0.101")
	loadBalancer = netip.MustParseAddr("10.5.0.100") // controlPlaneEndpoint
	secretsFile  = "secrets.yaml"
)

// adoption is the state of the test.
type adoption struct {
	*e2etest.Cluster
	t         *testing.T
	old       *old
	front     *balancer
	nodes     *osthread.Thread // the nodes' network
	right     string           // folder with the configurations of the document
	kubectlIn string           // the program
	mark      *e2etest.Mark
}

func TestAdoptKubeadm(t *testing.T) {
	made := e2etest.Built(t, qemu.Container)
	m := e2etest.Marks(t)
	a := &adoption{t: t, mark: m, kubectlIn: made.Kubectl(), old: newOld(t, made, oldAddress, loadBalancer)}
	m.Reached("kubeadm has made its files")
	a.right = configurations(t, a.old.path("/etc/kubernetes/pki"))
	wrong := configurations(t, "")
	a.Cluster = e2etest.New(t, "adopt", qemu.Container, func(o *qemu.Options) {
		o.ControlPlanes, o.Workers = 2, 1
		o.Prepare = func(dir string) error {
			from := a.right
			if filepath.Base(dir) == "adopt-controlplane-2" {
				from = wrong
			}
			return configure(dir, from)
		}
	})
	for _, n := range a.Nodes[:2] {
		if err := a.Cut(t.Context(), n.Name); err != nil {
			t.Fatal(err)
		}
	}
	a.begins()
	pod := a.works()
	before := a.before()
	w := write(t, a.nodes, a.file(adminConf))
	m.Reached("the cluster of kubeadm works, with a node and a pod")

	t.Run("the secrets of another cluster", func(t *testing.T) { a.in(t).refuses(a.Nodes[1]) })
	t.Run("the first control plane joins", func(t *testing.T) { a.in(t).joins(a.Nodes[0], 2) })
	t.Run("both serve the same", func(t *testing.T) { a.in(t).agree(a.Nodes[0].Address) })
	t.Run("the second control plane joins", func(t *testing.T) {
		a := a.in(t)
		a.reinstall(a.Nodes[1])
		a.joins(a.Nodes[1], 3)
	})
	t.Run("the old one goes", func(t *testing.T) { a.in(t).leaves() })
	t.Run("nothing was overwritten", func(t *testing.T) { a.in(t).kept(before) })
	t.Run("the cluster goes on", func(t *testing.T) { a.in(t).goesOn() })

	n, longest, last := w.end()
	m.Reached(fmt.Sprintf("%d writes, none for at most %.1fs", n, longest.Seconds()))
	if limit := eventually.Scale(silence); longest > limit {
		t.Errorf("the cluster took no write for %s, at most %s is allowed; the last error is %v", longest, limit, last)
	}
	if out := a.kubectl("get", "configmaps", "-n", "writes", "-l", "!none", "-o", "name"); strings.Count(out, "configmap/n") < n {
		t.Errorf("%d writes were acknowledged, %d are there", n, strings.Count(out, "configmap/n"))
	}
	if now := a.pod(); now != pod {
		t.Errorf("the pod was %q, and is %q", pod, now)
	}
}

// in is the adoption for a subtest.
func (a *adoption) in(t *testing.T) *adoption {
	part, o := *a, *a.old
	o.t = t
	part.t, part.Cluster, part.old = t, a.Cluster.In(t), &o
	return &part
}

// configurations follows the document: secrets from kubeadm's folder, or new
// ones, and the configurations with them.
func configurations(t *testing.T, pki string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	secrets := filepath.Join(dir, secretsFile)
	args := []string{"gen", "secrets", "-O", secrets}
	if pki != "" {
		args = append(args, "--from-kubernetes-pki", pki)
	}
	e2etest.Gbctl(t, args...)
	// The old cluster has no pod network: Garboard installs its own.
	withCNI := strings.ReplaceAll(patch(t, "cluster.yaml"), "cni: {name: none}", "cni: {name: flannel}")
	e2etest.Gbctl(t, "gen", "config", "kubernetes", fmt.Sprintf("https://%s:6443", loadBalancer), "--with-secrets", secrets, "--output-dir", dir,
		"--config-patch", withCNI, "--config-patch-control-plane", patch(t, "control-planes.yaml"))
	return dir
}

// patch is one of the files in the document.
func patch(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/adopting-kubeadm.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```yaml\n# "+name+"\n")
	yaml, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatalf("the document has no %s", name)
	}
	return yaml
}

// configure gives a node the cluster of such a configuration; its network
// settings stay.
func configure(dir, from string) error {
	path := filepath.Join(dir, "config.yaml")
	own, err := readYAML(path)
	if err != nil {
		return err
	}
	machine := own["machine"].(map[string]any)
	file := "worker.yaml"
	if machine["type"] != string(config.Worker) {
		// Never init.yaml: the cluster exists already.
		file, machine["type"] = "controlplane.yaml", string(config.ControlPlane)
	}
	// kubeadm's CoreDNS doesn't start on a node without a name server. The name
	// server need not answer.
	machine["network"].(map[string]any)["nameservers"] = []string{"10.5.0.1"}
	theirs, err := readYAML(filepath.Join(from, file))
	if err != nil {
		return err
	}
	own["cluster"] = theirs["cluster"]
	text, err := yaml.Marshal(own)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func readYAML(path string) (map[string]any, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var m map[string]any
	return m, yaml.Unmarshal(text, &m)
}

// begins starts the old cluster, and registers its node.
func (a *adoption) begins() {
	a.t.Helper()
	a.nodes = a.Network()
	front := machine(a.t, a.nodes, "front", netip.PrefixFrom(loadBalancer, network.Bits()))
	a.front = balance(a.t, front, loadBalancer)
	a.t.Cleanup(a.front.close)
	a.front.set(oldAddress)
	a.t.Cleanup(func() {
		if a.t.Failed() {
			for _, program := range []string{"kube-apiserver", "etcd"} {
				a.t.Logf("the log of the old %s ends with:\n%s", program, a.old.log(program))
			}
		}
	})
	a.old.serve(machine(a.t, a.nodes, "old", netip.PrefixFrom(oldAddress, network.Bits())))
	a.mark.Reached("the control plane of kubeadm serves")
	secrets, err := readYAML(filepath.Join(a.right, secretsFile))
	if err != nil {
		a.t.Fatal(err)
	}
	token, _ := secrets["cluster"].(map[string]any)["token"].(string)
	if _, err := a.old.run("kubeadm", "token", "create", token, "--kubeconfig="+adminConf); err != nil {
		a.t.Fatal(err)
	}
}

// workload is a pod on a fixed node, in the network of the node: the old
// cluster has no pod network.
const workload = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: workload, namespace: default}
spec:
  selector: {matchLabels: {app: workload}}
  template:
    metadata: {labels: {app: workload}}
    spec:
      hostNetwork: true
      tolerations: [{operator: Exists}]
      nodeSelector: {kubernetes.io/hostname: NODE}
      terminationGracePeriodSeconds: 1
      containers: [{name: workload, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
`

// works waits until the old cluster runs a pod, and returns the state that must not change.
func (a *adoption) works() string {
	a.t.Helper()
	a.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce=privileged")
	a.kubectl("create", "namespace", "writes")
	a.kubectl("create", "secret", "generic", "from-before", "--from-literal=key=of the old")
	a.kubectlWith(strings.NewReplacer("IMAGE", config.DefaultAPIServerImage, "NODE", a.Nodes[2].Name).Replace(workload), "apply", "-f", "-")
	a.Eventually(podsBudget, "the pod of the old cluster runs", func() error {
		out, err := a.try("get", "pods", "-l", "app=workload", "-o", "jsonpath={.items[*].status.phase}")
		if err == nil && out != "Running" {
			err = fmt.Errorf("it is %q", out)
		}
		return err
	})
	return a.pod()
}

func (a *adoption) pod() string {
	a.t.Helper()
	return a.kubectl("get", "pods", "-l", "app=workload", "-o", "jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].restartCount}{end}")
}

// adopted are kubeadm's objects for which Garboard uses the same names.
var adopted = []string{"daemonset/kube-proxy", "deployment/coredns", "service/kube-dns", "configmap/coredns", "configmap/kube-proxy", "configmap/kubeadm-config", "serviceaccount/kube-proxy"}

func (a *adoption) before() map[string]string {
	a.t.Helper()
	specs := map[string]string{}
	for _, object := range adopted {
		specs[object] = a.kubectl("get", "-n", "kube-system", object, "-o", "jsonpath={.metadata.uid} {.metadata.generation} {.spec} {.data}")
	}
	return specs
}

// kept checks that objects from before haven't changed.
func (a *adoption) kept(before map[string]string) {
	after := a.before()
	if !maps.Equal(before, after) {
		a.t.Errorf("objects were\n%v\nand are\n%v", before, after)
	}
}

// refuses: a control plane with the secrets of another cluster reports that. It
// can neither join etcd nor begin a cluster of its own.
func (a *adoption) refuses(n qemu.Node) {
	if err := a.On(a.t.Context(), n.Name); err != nil {
		a.t.Fatal(err)
	}
	address := n.Address.String()
	a.Eventually(joinBudget, "it says that its secrets are wrong", func() error {
		out, err := a.TryGbctl("-n", address, "service", "etcd")
		if err == nil && (!strings.Contains(out, "cluster.ca") || !strings.Contains(out, "another cluster")) {
			err = fmt.Errorf("it says %s", out)
		}
		return err
	})
	if out, err := a.TryGbctl("-n", address, "bootstrap"); err == nil || !strings.Contains(err.Error(), "another cluster") {
		a.t.Errorf("bootstrap: %s, %v", out, err)
	}
	if out := a.etcdctl("member", "list"); strings.Count(out, "started") != 1 || strings.Contains(out, n.Address.String()) {
		a.t.Errorf("etcd's members are\n%s", out)
	}
	if err := a.Cut(a.t.Context(), n.Name); err != nil {
		a.t.Fatal(err)
	}
}

// reinstall gives a node an empty disk and the right configuration.
func (a *adoption) reinstall(n qemu.Node) {
	dir := filepath.Join(a.Dir(), n.Name)
	for _, disk := range []string{"state", "var"} {
		if err := os.RemoveAll(filepath.Join(dir, disk)); err != nil {
			a.t.Fatal(err)
		}
	}
	if err := configure(dir, a.right); err != nil {
		a.t.Fatal(err)
	}
}

// joins turns a control plane on, and adds it to the load balancer after its
// etcd votes and its API server is ready.
func (a *adoption) joins(n qemu.Node, voting int) {
	if err := a.On(a.t.Context(), n.Name); err != nil {
		a.t.Fatal(err)
	}
	address := n.Address.String()
	a.Eventually(joinBudget, fmt.Sprintf("%d members vote", voting), func() error { return a.votes(address, voting) })
	a.mark.Reached(fmt.Sprintf("%d members vote", voting))
	if out, err := a.TryGbctl("-n", address, "bootstrap"); err == nil && !strings.Contains(out, "already") {
		a.t.Errorf("bootstrap of a node that has joined: %q", out)
	}
	a.Eventually(serveBudget, "its API server is ready", func() error {
		_, err := a.try("--server=https://"+address+":6443", "get", "--raw", "/readyz")
		return err
	})
	backends := []netip.Addr{oldAddress}
	for _, other := range a.Nodes[:voting-1] {
		backends = append(backends, other.Address)
	}
	a.front.set(backends...)
	a.mark.Reached(n.Name + " serves")
}

func (a *adoption) votes(address string, want int) error {
	out, err := a.TryGbctl("-n", address, "etcd", "status")
	if err == nil && strings.Count(out, "follower")+strings.Count(out, "leader") != want {
		err = fmt.Errorf("etcd status:\n%s", out)
	}
	return err
}

// agree: old and new API servers can read each other's Secrets, and accept each
// other's tokens.
func (a *adoption) agree(address netip.Addr) {
	servers := []string{"--server=https://" + oldAddress.String() + ":6443", "--server=https://" + address.String() + ":6443"}
	a.kubectl(servers[1], "create", "secret", "generic", "from-after", "--from-literal=key=of the new")
	for _, from := range servers {
		for _, secret := range []string{"from-before", "from-after"} {
			if out := a.kubectl(from, "get", "secret", secret, "-o", "jsonpath={.data.key}"); out == "" {
				a.t.Errorf("%s: Secret %s is empty", from, secret)
			}
		}
		token := strings.TrimSpace(a.kubectl(from, "create", "token", "default"))
		for _, to := range servers {
			// With the token only.
			out, err := a.run("", "--kubeconfig=/dev/null", to, "--certificate-authority="+a.old.path("/etc/kubernetes/pki/ca.crt"), "--token="+token, "auth", "whoami")
			if err != nil || !strings.Contains(out, "system:serviceaccount:default:default") {
				a.t.Errorf("a token from %s at %s: %q, %v", from, to, out, err)
			}
		}
	}
}

// leaves removes the old control plane, in the order of the document.
func (a *adoption) leaves() {
	first := a.Nodes[0].Address
	a.front.set(first, a.Nodes[1].Address)
	for _, program := range []string{"kube-scheduler", "kube-controller-manager", "kube-apiserver"} {
		a.old.end(program)
	}
	a.mark.Reached("the old API server has ended")
	var id string
	for line := range strings.Lines(a.Gbctl("-n", first.String(), "etcd", "members")) {
		if strings.Contains(line, oldAddress.String()) {
			id = strings.Fields(line)[1] // after the node's address
		}
	}
	a.Gbctl("-n", first.String(), "etcd", "remove-member", id)
	a.old.end("etcd")
	a.Eventually(joinBudget, "two members vote", func() error { return a.votes(first.String(), 2) })
	a.Eventually(goneBudget, "Kubernetes knows no API server of the old", func() error {
		out, err := a.try("get", "endpointslices", "kubernetes", "-o", "jsonpath={.endpoints[*].addresses[*]}")
		if err == nil && len(strings.Fields(out)) != 2 || strings.Contains(out, oldAddress.String()) {
			err = fmt.Errorf("it knows %s", out)
		}
		return err
	})
	a.mark.Reached("the old control plane is gone")
}

// web is a workload for the cluster after the adoption.
const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: web
        image: IMAGE
        command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8080, --accept-hosts=.*, --www=/etc/pod, --www-prefix=/pod/]
        readinessProbe: {httpGet: {path: /pod/app, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
        volumeMounts: [{name: pod, mountPath: /etc/pod}]
      volumes:
      - name: pod
        downwardAPI: {items: [{path: app, fieldRef: {fieldPath: "metadata.labels['app']"}}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// goesOn: new pods run, and find each other through kubeadm's kube-proxy and
// CoreDNS.
func (a *adoption) goesOn() {
	a.Eventually(podsBudget, "all nodes are Ready", func() error {
		out, err := a.try("get", "nodes", "-o", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status} {end}`)
		if err == nil && strings.Count(out, "True") != len(a.Nodes) {
			err = fmt.Errorf("they are %s", out)
		}
		return err
	})
	a.kubectlWith(strings.ReplaceAll(web, "IMAGE", config.DefaultAPIServerImage), "apply", "-f", "-")
	a.Eventually(podsBudget, "a new Deployment runs", func() error {
		out, err := a.try("get", "deployment", "web", "-o", "jsonpath={.status.readyReplicas}")
		if err == nil && out != "2" {
			err = fmt.Errorf("%q of 2 are ready", out)
		}
		return err
	})
	a.Eventually(podsBudget, "its pods reach the Service by its name", func() error {
		out, err := a.try("exec", "deployment/web", "--", "/usr/local/bin/kubectl", "--server=http://web", "--request-timeout=5s", "get", "--raw", "/pod/app")
		if err == nil && out != "web" {
			err = fmt.Errorf("%q answers", out)
		}
		return err
	})
}
