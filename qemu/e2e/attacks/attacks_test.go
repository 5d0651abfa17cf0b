//go:build e2e

// Package attacks tests what a pod that has the file system of its node gets with it: nothing
// that PID 1 opens, runs or answers. Beside each attack is the use that goes on. What else
// comes with a worker, its tokens and its accounts, is attacked in package worker.
package attacks

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	image     = "registry.example/garboard/intruder:1" // RFC 2606
	podBudget = 60 * time.Second
	// logBudget is for lines to arrive, and for PID 1 to look at its files a few times.
	logBudget = 30 * time.Second
	// backBudget is for a node to stop and to be Ready again.
	backBudget = 120 * time.Second
	// most of PID 1's memory, in MiB: what follows a link to /dev/zero takes ever more.
	most = 256
)

// Paths on a node (the table in docs/design.md).
const (
	configFile = "/system/state/config.yaml"
	auditLog   = "/var/log/audit/kube/kube-apiserver.log"
)

// pod has the node's file system. It asks for no other right.
const pod = `
apiVersion: v1
kind: Pod
metadata: {name: intruder, namespace: kube-system}
spec:
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: intruder
    image: ` + image + `
    command: [/intruder, wait]
    volumeMounts: [{name: host, mountPath: /host}]
  volumes: [{name: host, hostPath: {path: /}}]
`

type attacked struct{ *e2etest.Cluster }

func TestPodWithTheFileSystem(t *testing.T) {
	cluster, m := e2etest.Ready(t, "attacks", qemu.Container, e2etest.WithImage(t, image, "intruder"), func(o *qemu.Options) {
		o.Patches = append(o.Patches, []byte("machine: {kubelet: {persist: [volumePlugins]}}"))
	})
	c := attacked{cluster}
	c.Apply(pod)
	c.runs(podBudget)
	m.Reached("the pod runs")
	t.Run("machine API behind its gate", func(t *testing.T) { attacked{c.In(t)}.socket(t) })
	t.Run("links and pipes in place of logs", func(t *testing.T) { attacked{c.In(t)}.logs(t) })
	m.Reached("the logs are attacked")
	t.Run("keys that no container has", func(t *testing.T) { attacked{c.In(t)}.keys(t) })
	t.Run("mounts of storage drivers", func(t *testing.T) { attacked{c.In(t)}.drivers(t) })
	t.Run("the machine's ID", func(t *testing.T) { attacked{c.In(t)}.machineID(t) })
	t.Run("what a Node says of its machine", func(t *testing.T) { attacked{c.In(t)}.nodeInfo(t) })
	t.Run("files for the next start", func(t *testing.T) { attacked{c.In(t)}.start(t) })
	m.Reached("the node has started again")
}

// runs waits until the pod runs.
func (c attacked) runs(budget time.Duration) {
	c.T().Helper()
	c.Eventually(budget, "the pod runs", func() error {
		_, err := c.Try("-n", "kube-system", "exec", "intruder", "--", "/intruder", "aside")
		return err
	})
}

// does runs a verb in the pod, whose paths are those of the node.
func (c attacked) does(verb string, args ...string) string {
	c.T().Helper()
	return c.Kubectl(append([]string{"-n", "kube-system", "exec", "intruder", "--", "/intruder", verb}, args...)...)
}

// host is the place of a path of the node in the pod.
func host(path string) string { return filepath.Join("/host", path) }

// socket: the socket there is the kubelet's way to images. That of the machine API has no name.
func (c attacked) socket(t *testing.T) {
	out := c.does("call", host("/run/garboard"))
	for line := range strings.Lines(out) {
		if name := filepath.Base(strings.SplitN(line, ":", 2)[0]); name != "images.sock" {
			t.Errorf("a pod finds the socket %s", line)
		}
	}
	if !strings.Contains(out, "images.sock") || strings.Contains(out, "200 OK") {
		t.Errorf("the sockets that a pod finds answer\n%s", out)
	}
	if out := c.Gbctl("read", configFile); !strings.Contains(out, string(c.Secrets().MachineToken)) {
		t.Errorf("an administrator doesn't get the configuration:\n%.300s", out)
	}
}

const destination = `
machine:
  logging: {destinations: [{endpoint: "tcp://ADDRESS", format: json_lines}]}
`

// logs: PID 1 sends the audit log of the API server elsewhere. What a pod puts in its place
// isn't sent and doesn't fill the memory, and nothing waits for it, nor for its end.
func (c attacked) logs(t *testing.T) {
	listener, err := c.Network().Listen("10.5.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	lines := e2etest.Collect(t, listener)
	c.Gbctl("patch", "mc", "--immediate", "-p", strings.Replace(destination, "ADDRESS", listener.Addr().String(), 1))
	arrives := func(name string) {
		t.Helper()
		c.Eventually(logBudget, "the audit line about "+name, func() error {
			_, _ = c.Try("create", "namespace", name) // it is there from the second time on
			return lines.Has("namespaces/" + name)
		})
	}
	arrives("before")

	log := host(auditLog)
	beside := func(what string) {
		t.Helper()
		const other = `"service":"kubelet"`
		before := lines.Count(other)
		c.Gbctl("service", "kubelet", "restart")
		c.Eventually(logBudget, "lines of another log arrive beside "+what, func() error {
			if lines.Count(other) == before {
				return fmt.Errorf("there are %d, as before", before)
			}
			return c.small()
		})
		c.runs(podBudget) // the kubelet serves again
	}
	c.does("aside", log)
	for name, target := range map[string]string{
		"a link to the configuration":    configFile,
		"a link up to it":                "../../../.." + configFile,
		"a link to a device without end": "/dev/zero",
	} {
		c.does("link", target, log)
		beside(name)
	}
	for _, secret := range []string{string(c.Secrets().MachineToken), string(c.Secrets().BootstrapToken)} {
		if lines.Has(secret) == nil {
			t.Errorf("%q of the configuration was sent to the destination", secret)
		}
	}
	c.does("back", log)
	arrives("after")

	c.does("aside", log)
	c.does("fifo", log)
	beside("a pipe")
	c.Gbctl("apply-config", "--immediate", "-f", c.Configuration(c.Node()))
	c.Eventually(logBudget, "the destination isn't served any more", func() error {
		out, err := c.TryGbctl("get", "logdestinations")
		if err == nil && strings.Contains(out, listener.Addr().String()) {
			err = fmt.Errorf("destinations are\n%s", out)
		}
		return err
	})
	c.does("back", log)
}

// small returns an error if PID 1 takes too much memory.
func (c attacked) small() error {
	out, err := c.TryGbctl("memory", "-o", "json")
	if err != nil {
		return err
	}
	var memory struct {
		Pid1PSS uint64 `json:"pid1Pss"`
	}
	err = json.Unmarshal([]byte(out), &memory)
	if err == nil && (memory.Pid1PSS == 0 || memory.Pid1PSS > most<<20) {
		err = fmt.Errorf("PID 1 takes %d bytes, at most %d MiB are expected:\n%s", memory.Pid1PSS, most, out)
	}
	return err
}

// keys: what PID 1 keeps, and what it tells its sandboxes, isn't there for a pod, to be read or replaced. What pods
// have of the node is.
func (c attacked) keys(t *testing.T) {
	const state = "/apid/state.json"
	out := c.does("read", host(configFile), host("/system/state/machine-id"), host("/system/run"+state), host("/run/garboard"+state))
	if strings.Count(out, "no such file or directory") != 4 {
		t.Errorf("a pod reads\n%.500s", out)
	}
	if out, err := c.Try("-n", "kube-system", "exec", "intruder", "--", "/intruder", "write", host(configFile), "machine: {}"); err == nil || !strings.Contains(out+err.Error(), "read-only file system") {
		t.Errorf("a pod writes the configuration: %v\n%s", err, out)
	}
	if out := c.does("read", host("/etc/hostname"), host("/proc/1/comm")); strings.Count(out, "<nil>") != 2 {
		t.Errorf("a pod doesn't read\n%s", out)
	}
	if out := c.Gbctl("ls", "/system/run/apid"); !strings.Contains(out, "state.json") {
		t.Errorf("apid has\n%s", out)
	}
}

// driver mounts what other pods then find, as storage drivers do; user is such a pod.
const driver = `
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: kube-system}
spec:
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: intruder
    image: ` + image + `
    command: [/intruder, wait]
    securityContext: {privileged: PRIVILEGED}
    volumeMounts: [{name: plugins, mountPath: /plugins, mountPropagation: PROPAGATION}]
  volumes: [{name: plugins, hostPath: {path: /var/lib/kubelet/plugins/driver, type: DirectoryOrCreate}}]
`

// drivers: although containerd has mounts of its own, what a pod mounts is seen by the node, by pods that run and by
// those that start later.
func (c attacked) drivers(t *testing.T) {
	start := func(name, privileged, propagation string) {
		c.Apply(strings.NewReplacer("NAME", name, "PRIVILEGED", privileged, "PROPAGATION", propagation).Replace(driver))
		c.Kubectl("-n", "kube-system", "wait", "--for=condition=Ready", "pod/"+name, "--timeout="+podBudget.String())
	}
	start("driver", "true", "Bidirectional")
	start("before", "false", "HostToContainer")
	c.Kubectl("-n", "kube-system", "exec", "driver", "--", "/intruder", "mount", "/plugins/volume")
	start("later", "false", "None")
	for _, name := range []string{"before", "later"} {
		if out := c.Kubectl("-n", "kube-system", "exec", name, "--", "/intruder", "read", "/plugins/volume/made"); !strings.Contains(out, "<nil>") {
			t.Errorf("the pod %s doesn't see the mount: %s", name, out)
		}
	}
	if out := c.Gbctl("ls", "/var/lib/kubelet/plugins/driver/volume"); !strings.Contains(out, "made") {
		t.Errorf("the node doesn't see the mount:\n%s", out)
	}
	c.Kubectl("-n", "kube-system", "delete", "pod", "driver", "before", "later", "--wait=true")
}

const label = `
machine:
  kubelet: {nodeLabels: {attacks.example/by: "BY"}}
`

// machineID: what a pod puts in its place is neither waited for nor read to its end.
func (c attacked) machineID(t *testing.T) {
	id := host("/etc/machine-id")
	c.does("aside", id)
	labelled := func(by string) {
		t.Helper()
		c.Gbctl("patch", "mc", "--immediate", "-p", strings.Replace(label, "BY", by, 1))
		c.Eventually(logBudget, "the node has its label", func() error {
			if out, err := c.Try("get", "node", "-l", "attacks.example/by="+by, "-o", "name"); err != nil || out == "" {
				return fmt.Errorf("%q, %w", out, err)
			}
			return c.small()
		})
	}
	c.does("link", "/dev/zero", id)
	labelled("a-device")
	c.does("fifo", id)
	labelled("a-pipe")
	c.does("back", id)
	c.Gbctl("apply-config", "--immediate", "-f", c.Configuration(c.Node()))
}

// detector may write the status of Nodes, as problem detectors and networks may.
const detector = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: detector, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: detector}
rules: [{apiGroups: [""], resources: [nodes, nodes/status], verbs: [get, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: detector}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: detector}
subjects: [{kind: ServiceAccount, name: detector, namespace: kube-system}]
`

// nodeInfo: by the machine's ID, PID 1 knows whose a Node is, and by the port of its kubelet the API server finds that.
func (c attacked) nodeInfo(t *testing.T) {
	c.Apply(detector)
	patch := func(status string) (string, error) {
		return c.Try("--as=system:serviceaccount:kube-system:detector", "patch", "node", c.Node(), "--subresource=status", "--type=merge", "-p", `{"status":`+status+`}`)
	}
	for _, status := range []string{`{"nodeInfo":{"machineID":"other"}}`, `{"daemonEndpoints":{"kubeletEndpoint":{"Port":1234}}}`} {
		if out, err := patch(status); err == nil || !strings.Contains(err.Error()+out, "by the node itself and by administrators only") {
			t.Errorf("%s was written: %v\n%s", status, err, out)
		}
	}
	if out, err := patch(`{"conditions":[{"type":"Hot","status":"False","reason":"Cool","message":"all is well"}]}`); err != nil {
		t.Errorf("a condition isn't written: %v\n%s", err, out)
	}
}

// rooted is a static pod that runs as root with all rights.
const rooted = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"rooted","namespace":"kube-system"},"spec":{"hostPID":true,"containers":[{"name":"a","image":"` +
	image + `","command":["/intruder","wait"],"securityContext":{"privileged":true}}]}}`

// start: what a pod leaves on the node's disk doesn't change the next start, and doesn't keep
// the node from stopping and starting.
func (c attacked) start(t *testing.T) {
	const broken = "this isn't TOML\n"
	configuration := c.Gbctl("read", configFile)
	c.does("write", host("/var/lib/pod-checkpointer/manifests/rooted.json"), rooted)
	c.does("write", host("/var/cri/conf.d/intruder.toml"), broken)
	for _, log := range []string{"kubelet", "etcd"} {
		path := host("/var/log/" + log + ".log")
		c.does("aside", path)
		c.does("link", configFile, path)
	}
	// Programs that the node would run, as containerd's own or for the network of pods.
	for _, program := range []string{"containerd/bin/containerd-shim-runc-v2", "containerd/bin/unpigz", "containerd/image-verifier/bin/yes", "cni/bin/unpigz", "cni/bin/loopback", "cni/bin/flannel"} {
		c.does("copy", host("/var/opt/"+program))
	}
	if out := c.Gbctl("ls", "/opt/cni/bin"); !strings.Contains(out, "unpigz") || !strings.Contains(out, "bridge") {
		t.Errorf("the plugins of pods and of the image are\n%s", out)
	}
	// Its configuration has the name of this one.
	const drivers = "/etc/kubernetes/volumeplugins"
	c.does("write", host(drivers+"/kept/driver"), "of a pod")
	if out := c.Gbctl("get", "volumes"); !e2etest.Row(out, "persist/volumePlugins", "EPHEMERAL", "true") || strings.Contains(out, "persist/cni") {
		t.Errorf("what is kept is\n%s", out)
	}
	// What keeps a node from its directories and its kubelet's files.
	for _, path := range []string{"/var/log/pods", "/var/lib/kubelet/kubeconfig", "/var/lib/kubelet/pki"} {
		c.does("aside", host(path))
	}
	c.does("link", "/", host("/var/log/pods"))
	c.does("write", host("/var/lib/kubelet/kubeconfig/deep"), "")
	c.does("write", host("/var/lib/kubelet/pki"), "")
	c.Patient(backBudget).Gbctl("reboot", "--wait")
	c.Eventually(backBudget, "the node is Ready", func() error { return c.NodesReady(c.Nodes...) })
	c.runs(podBudget)
	if out := c.Gbctl("logs", "kubelet"); !strings.Contains(out, "kubelet") {
		t.Errorf("the log of the kubelet is\n%.300s", out)
	}
	if out := c.Gbctl("ls", "/var"); strings.Contains(out, "intruder-was") {
		t.Errorf("the node ran a program of a pod:\n%s", out)
	}
	if out := c.Gbctl("ls", "/opt/cni/bin"); strings.Contains(out, "unpigz") || !strings.Contains(out, "loopback") {
		t.Errorf("the CNI plugins are\n%s", out)
	}
	if out := c.Gbctl("ls", drivers); !strings.Contains(out, "kept") {
		t.Errorf("the drivers of volumes are\n%s", out)
	}
	if out := c.Gbctl("containers", "-k"); strings.Contains(out, "rooted") {
		t.Errorf("a file of a pod is a static pod:\n%s", out)
	}
	if out := c.Gbctl("service", "containerd"); !strings.Contains(out, "Running") {
		t.Errorf("a file of a pod is part of containerd's configuration:\n%s", out)
	}
	if out := c.Gbctl("read", configFile); out != configuration {
		t.Errorf("the configuration is another one:\n%.300s", out)
	}
}
