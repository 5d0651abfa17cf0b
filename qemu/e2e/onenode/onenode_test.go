//go:build e2e

// Package onenode tests one node. It becomes a Kubernetes cluster that runs pods,
// loses its power, and is the same cluster again: in a container and, among the long
// tests, in an emulated machine. Neither has access to any outside network. Before
// that its services are killed, and it is broken in the ways of the troubleshooting
// guide: gbctl doctor then reports what is broken, with the reason and the evidence.
package onenode

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget = 20 * time.Second // for two pods whose image is on the node
	// for kube-proxy and DNS to know them; after a power cut also for all to run: until then the API has the old state
	serviceBudget = 60 * time.Second

	// getBudget is for one request between pods: a lost DNS query is repeated
	// after five seconds (resolv.conf(5)).
	getBudget = 12 * time.Second
	// noBudget is for a request that must not be answered.
	noBudget = 5 * time.Second

	// powerOffBudget is a promise: a machine that is asked to power off has done
	// so within it, whatever runs.
	powerOffBudget = 30 * time.Second
)

// web are two pods, a service and a client, of an image that is on the node
// already. kubectl's proxy is a small HTTP server of files, and kubectl a small
// HTTP client: the image has no shell, and needs none.
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
        ports: [{containerPort: 8080}]
        readinessProbe: {httpGet: {path: /pod/name, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
        volumeMounts: [{name: pod, mountPath: /etc/pod}]
        securityContext: {allowPrivilegeEscalation: false, seccompProfile: {type: RuntimeDefault}}
      volumes:
      - name: pod
        downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: client
    image: IMAGE
    command: [/usr/local/bin/kubectl, proxy, --port=8001]
`

// name is the name of the tests' common cluster.
const name = "one"

// At the end its node is off, so it is the last test that shares the cluster.
func TestOneNodeInContainer(t *testing.T) {
	c, m := e2etest.Shared(t, name, qemu.Container)
	oneNode(t, c, m)
	t.Run("power off", func(t *testing.T) { powersOff(t, c.In(t)) })
}

func oneNode(t *testing.T, c *e2etest.Cluster, m *e2etest.Mark) {
	c.Apply(strings.ReplaceAll(web, "IMAGE", config.DefaultAPIServerImage))
	c.Eventually(podsBudget, "the pods run and are ready", func() error { return ready(c) })
	m.Reached("pods are ready")
	works(t, c)
	m.Reached("the pods answer")
	inside(t, c)
	unreachable(t, c)
	m.Reached("nothing outside does")
	finds(t, c)
	boots(t, c)
	mounts(t, c)
	m.Reached("a pod has the paths of charts")
	loads(t, c)
	m.Reached("an image of this machine was loaded, and another one in its place")
	before := objects(c)

	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	m.Reached("power is cut")
	m = e2etest.Marks(t)
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	m.Reached("power is on again")
	c.Ready(m)
	c.Eventually(podsBudget, "the pods run and are ready again", func() error { return ready(c) })
	m.Reached("pods are ready")
	works(t, c)
	m.Reached("the pods answer")
	for object, uid := range objects(c) {
		if before[object] != uid {
			t.Errorf("%s had UID %q before the power cut, and has %q", object, before[object], uid)
		}
		delete(before, object)
	}
	if len(before) > 0 {
		t.Errorf("lost in the power cut: %v", before)
	}
}

// finds: the node says how far it gets, to what answers and to what doesn't.
func finds(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	const router = "10.5.0.1" // this machine in the nodes' network; it has a registry without TLS
	for to, want := range map[string]string{
		net.JoinHostPort(router, "5000"): "has no TLS", net.JoinHostPort(router, "1"): "ENDS", router: "neighbour",
	} {
		if out, err := c.TryGbctl("-n", c.Node(), "netcheck", to); !strings.Contains(out, want) {
			t.Errorf("netcheck %s: %v, want %q\n%s", to, err, want, out)
		}
	}
}

// pods are the names of the web pods.
func pods(c *e2etest.Cluster) ([]string, error) {
	out, err := c.Try("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}")
	return strings.Fields(out), err
}

// ready: after a power cut the API has the old state, so this checks the
// kubelet's status, by the containers' start times.
func ready(c *e2etest.Cluster) error {
	out, err := c.Try("get", "pods", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
	if err != nil {
		return err
	}
	if n := strings.Count(out, " True\n"); n != 3 {
		return fmt.Errorf("%d of 3 pods are ready:\n%s", n, out)
	}
	return nil
}

// get is an HTTP request from the client pod.
func get(c *e2etest.Cluster, url, path string) (string, error) {
	return getWithin(c, eventually.Scale(getBudget), url, path)
}

func getWithin(c *e2etest.Cluster, budget time.Duration, url, path string) (string, error) {
	return c.Try("exec", "client", "--", "/usr/local/bin/kubectl", "--server="+url, "--request-timeout="+budget.Round(time.Second).String(), "get", "--raw", path)
}

// works: both pods answer through the service's name, and logs and exec work.
func works(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	want, err := pods(c)
	if err != nil || len(want) != 2 {
		t.Fatalf("pods %q: %v", want, err)
	}
	answered := map[string]bool{}
	c.Eventually(serviceBudget, "both pods answer at http://web", func() error {
		// The short name needs the pod's search path.
		name, err := get(c, "http://web", "/pod/name")
		if err != nil {
			return err
		}
		if !slices.Contains(want, name) {
			return fmt.Errorf("%q answers", name)
		}
		if answered[name] = true; len(answered) < 2 {
			return fmt.Errorf("only %s has answered", name)
		}
		return nil
	})
	for _, pod := range want {
		if log := c.Kubectl("logs", pod); !strings.Contains(log, "Starting to serve") {
			t.Errorf("log of %s: %q", pod, log)
		}
	}
}

// inside: exec runs in each pod, with any name of the service.
func inside(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	want, err := pods(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range want {
		if out := c.Kubectl("exec", pod, "--", "/usr/local/bin/kubectl", "version", "--client"); !strings.Contains(out, config.KubernetesVersion) {
			t.Errorf("exec in %s: %q", pod, out)
		}
	}
	ip := c.Kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	for _, name := range []string{"web.default.svc.cluster.local", ip} {
		c.Eventually(serviceBudget, "it answers as "+name, func() error {
			_, err := get(c, "http://"+name, "/pod/name")
			return err
		})
	}
}

// unreachable: a pod can reach neither any other machine nor this one.
func unreachable(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	here, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	go func() {
		for {
			conn, err := here.Accept()
			if err != nil {
				return
			}
			t.Errorf("the node came through to this machine, from %s", conn.RemoteAddr())
			conn.Close()
		}
	}()
	port := here.Addr().(*net.TCPAddr).Port
	outside := []string{
		"http://198.51.100.1", // RFC 5737: an address for documents
		fmt.Sprintf("http://10.5.0.1:%d", port),
	}
	var all sync.WaitGroup
	for _, url := range outside {
		all.Go(func() {
			if out, err := getWithin(c, noBudget, url, "/"); err == nil {
				t.Errorf("%s answers %q", url, out)
			}
		})
	}
	all.Wait()
}

// boots prints the console's lines about the boot.
func boots(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	for _, what := range [][]string{
		{"udevd: ", "(up)"}, {"networkd: ", "(up)"}, {"disks: ", "(up)"}, {"containerd: ", "(up)"}, {"etcd: ", "(up)"}, {"kubelet: ", "(up)"},
		{"static pod ", "apiserver", ": ready"},
	} {
		line := c.Says(time.Second, 0, what...)
		t.Logf("%7.1fs  after the kernel's start: %s", line.At.Seconds(), line.Text)
	}
}

// objects are UIDs of objects that must survive a power cut. Mirror pods don't:
// each boot makes new keys, and so other static pods.
func objects(c *e2etest.Cluster) map[string]string {
	uids := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(c.Kubectl(
		"get", "namespaces,nodes,deployments,replicasets,pods,services,configmaps,serviceaccounts,daemonsets", "--all-namespaces",
		"-o", `jsonpath={range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name} {.metadata.uid}{"\n"}{end}`)), "\n") {
		object, uid, _ := strings.Cut(line, " ")
		if strings.HasPrefix(object, "Pod/kube-system/kube-") && strings.HasSuffix(object, c.Node()) {
			continue
		}
		uids[object] = uid
	}
	return uids
}

// powersOff presses the power button.
func powersOff(t *testing.T, c *e2etest.Cluster) {
	start := time.Now()
	if err := c.Off(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	end := time.Now()
	t.Logf("%7.1fs  from the power button to power off", end.Sub(start).Seconds())
	if err := c.Promised(start, end, powerOffBudget); err != nil {
		t.Error(err)
	}
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status[0].State != "off" {
		t.Errorf("the node is %q", status[0].State)
	}
	// A container's console is a file of its host; PID 1 waits up to a second for it.
	stood := c.Provisioner == qemu.Container && eventually.Lost(start, end) >= time.Second
	if !stood && !strings.Contains(c.Text(), "power off now") {
		t.Error("the console doesn't say that the machine powers off")
	}
}
