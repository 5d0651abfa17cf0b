//go:build e2e && long

// Package convert tests the conversion of a self-hosted control plane to static pods.
package convert

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podBudget = 60 * time.Second
	// checkpointBudget is for pod-checkpointer to remove its checkpoints, 5 minutes after it was deleted.
	checkpointBudget = 8 * time.Minute
	// rolloutBudget is for the pods of a DaemonSet to be replaced, one after another.
	rolloutBudget = 4 * time.Minute
	convertBudget = 10 * time.Minute
	writeBudget   = 30 * time.Second
	// silence is the promise to clients of the load balancer: how long a conversion may take
	// the API server from them.
	silence = 5 * time.Second
)

var programs = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// initializedKey marks a self-hosted control plane in etcd.
const initializedKey = "/garboard.dev/initialized"

// selfHosted checks what each control plane reports, and whether its etcd has the key.
func selfHosted(c *e2etest.Cluster, want bool) {
	t, inside := c.T(), c.Network()
	t.Helper()
	for _, n := range c.ControlPlanes() {
		out := c.Gbctl("-n", n.Address.String(), "get", "bs", "control-plane")
		if !e2etest.Row(out, "control-plane", fmt.Sprint(want)) {
			t.Errorf("%s: self-hosted isn't %v:\n%s", n.Name, want, out)
		}
		got, err := c.Etcd(inside, n).Get(t.Context(), initializedKey, clientv3.WithSerializable())
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Kvs) > 0 != want {
			t.Errorf("etcd of %s: it has %q: %v, want %v", n.Name, initializedKey, !want, want)
		}
	}
}

// converted checks that the programs of all control planes are static pods, and nothing else: in
// etcd, in Kubernetes and on the nodes themselves.
func converted(c *e2etest.Cluster) {
	t := c.T()
	t.Helper()
	selfHosted(c, false)
	sets := c.Kubectl("-n", "kube-system", "get", "daemonsets,secrets", "-o", "name")
	for _, name := range append([]string{"pod-checkpointer"}, programs...) {
		if strings.Contains(sets, "daemonset.apps/"+name) {
			t.Errorf("DaemonSet %s is still there:\n%s", name, sets)
		}
	}
	if strings.Contains(sets, "garboard-conversion") {
		t.Errorf("the Secret with the new authority is still there:\n%s", sets)
	}
	c.Eventually(podBudget, "the static pods are ready, and no others are there", func() error {
		const columns = `{range .items[*]}{.metadata.name} {.spec.nodeName} {.status.conditions[?(@.type=="Ready")].status} {.metadata.annotations.kubernetes\.io/config\.source}{"\n"}{end}`
		pods, err := c.Try("-n", "kube-system", "get", "pods", "-l", "k8s-app in (pod-checkpointer,"+strings.Join(programs, ",")+")", "-o", "jsonpath="+columns)
		if err != nil {
			return err
		}
		for _, n := range c.ControlPlanes() {
			for _, program := range programs {
				if !e2etest.Row(pods, program+"-"+n.Name, n.Name, "True", "file") {
					return fmt.Errorf("no static pod of %s is ready on %s:\n%s", program, n.Name, pods)
				}
			}
		}
		if strings.Count(pods, "\n") != len(programs)*len(c.ControlPlanes()) {
			return fmt.Errorf("there are other pods, too:\n%s", pods)
		}
		return nil
	})
	secrets := map[string]bool{}
	for _, n := range c.ControlPlanes() {
		secrets[convertedNode(c, n)] = true
	}
	if len(secrets) != 1 {
		t.Errorf("the control planes have %d different authorities or keys of service accounts", len(secrets))
	}
}

// convertedNode checks what runs on a control plane, and returns the secrets that its static pods need.
func convertedNode(c *e2etest.Cluster, n qemu.Node) string {
	t, node := c.T(), n.Address.String()
	t.Helper()
	containers := c.Gbctl("-n", node, "containers", "-k")
	for _, program := range programs {
		running := 0
		for line := range strings.Lines(containers) {
			if strings.Contains(line, " kube-system/"+program+"-") && strings.Contains(line, "CONTAINER_RUNNING") {
				running++
			}
		}
		if running != 1 || !e2etest.Row(containers, "kube-system/"+program+"-"+n.Name+":"+program, "CONTAINER_RUNNING") {
			t.Errorf("%s runs %d times on %s, or isn't a static pod:\n%s", program, running, n.Name, containers)
		}
	}
	if out, err := c.TryGbctl("-n", node, "ls", "/var/lib/pod-checkpointer"); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("%s still has checkpoints: %v\n%s", n.Name, err, out)
	}
	const dir = "/system/secrets/kubernetes/kube-apiserver/"
	return c.Gbctl("-n", node, "read", dir+"service-account.key") + c.Gbctl("-n", node, "read", dir+"aggregator-ca.crt")
}

// aggregated is an API that the API server asks another one for.
const aggregated = `
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.boats.example}
spec:
  group: boats.example
  version: v1beta1
  service: {name: shipyard, namespace: harbour}
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
`

// S-260, S-290 to S-303, Q-18: a control plane is self-hosted over a reboot, goes back to it at the
// answer no, and becomes static pods while pods run on.
func TestS301Convert(t *testing.T) {
	c, m := e2etest.Ready(t, "convert", qemu.Container, e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot")
	node := c.Nodes[0].Address.String()
	selfHosted(c, true)
	before := c.RunWeb(podBudget, config.DefaultAPIServerImage)

	c.Apply(aggregated)
	dry := c.Gbctl("-n", node, "convert-k8s", "--dry-run")
	c.Golden("convert-k8s-dry-run", dry)
	if strings.Contains(dry, "the DaemonSet has") {
		t.Errorf("the new definitions differ:\n%s", dry)
	}
	if text := c.Gbctl("-n", node, "get", "mc", "-o", "yaml"); strings.Contains(text, "aggregatorCA") {
		t.Errorf("the dry run has changed the configuration:\n%s", text)
	}

	s := c.Session("-n", node, "convert-k8s", "--remove-checkpoints")
	for _, question := range []string{first, second} {
		s.Asks(askBudget, question)
		s.Type("yes")
	}
	if err := s.End(convertBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	c.Golden("convert-k8s", s.Text())
	m.Reached("converted")
	c.Eventually(podBudget, "the pod is as it was", func() error {
		after, err := c.ContainerID(e2etest.Web)
		if err == nil && after != before {
			t.Errorf("the conversion has replaced container %s by %s", before, after)
		}
		return err
	})
	converted(c)

	c.Gbctl("-n", node, "reboot", "--wait")
	m.Reached("rebooted")
	c.Eventually(podBudget, "the static pods are ready", func() error {
		out, err := c.TryGbctl("-n", node, "health")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	selfHosted(c, false)
}

// Three control planes are converted while clients write and read: nothing that was
// acknowledged is lost.
func TestConvertUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "convert3", qemu.Container, e2etest.Nodes(3, 0), e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot of all nodes at once")
	selfHosted(c, true)
	load := c.Write(e2etest.KubernetesStore(c.Endpoint()))
	load.Goes(writeBudget, "before the conversion")
	out, err := c.Patient(convertBudget).TryGbctl("-n", c.Nodes[1].Address.String(), "convert-k8s", "--remove-checkpoints", "--yes")
	t.Log(out)
	if err != nil {
		t.Fatal(err)
	}
	longest := load.Longest() // Goes begins a new one
	m.Reached("converted")
	converted(c)
	load.Goes(writeBudget, "after the conversion")
	load.Stop()
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": load.Read})
	t.Logf("the longest time without an acknowledged write was %s", longest.Took)
	if err := c.Promised(longest.From, longest.From.Add(longest.Took), silence); err != nil {
		t.Errorf("without an acknowledged write: %v", err)
	}
}

// S-195, S-305, S-306: the conversion by hand, with the commands of docs/moving-a-control-plane.md.
func TestS306ConvertByHand(t *testing.T) {
	c, m := e2etest.Ready(t, "byhand", qemu.Container, e2etest.Nodes(2, 0), e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot of all nodes at once")
	node := c.Nodes[0].Address.String()
	before := c.RunWeb(podBudget, config.DefaultAPIServerImage)
	annotated(c)
	m.Reached("all programs have checkpoints again")

	// The key alone would leave no control plane: this is refused.
	out, err := c.TryGbctl("-n", node, "convert-k8s", "--remove-initialized-key")
	if err == nil || !strings.Contains(err.Error(), "its configuration has no cluster.aggregatorCA or no cluster.serviceAccount") {
		t.Errorf("the key is removed too early: %v\n%s", err, out)
	}
	selfHosted(c, true)

	c.Patient(convertBudget).Gbctl("-n", node+","+c.Nodes[1].Address.String(), "patch", "mc", "--immediate", "-p", completing(c))
	for _, n := range c.Nodes {
		c.Eventually(podBudget, "the new definitions are on "+n.Name, func() error { return defined(c, n) })
	}
	selfHosted(c, true)
	m.Reached("the new definitions are there")

	c.Kubectl("-n", "kube-system", "delete", "daemonset", "pod-checkpointer")
	c.Eventually(checkpointBudget, "no pod is a checkpoint", func() error {
		pods, err := c.Try("-n", "kube-system", "get", "pods", "-o", "yaml")
		if err == nil && strings.Contains(pods, "checkpointer.alpha.coreos.com/checkpoint-of") {
			err = errors.New("there still is one")
		}
		return err
	})
	m.Reached("the checkpoints are gone")

	t.Log(c.Patient(convertBudget).Gbctl("-n", node, "convert-k8s", "--remove-initialized-key"))
	selfHosted(c, false)
	sets := c.Kubectl("-n", "kube-system", "get", "daemonsets", "-o", "name")
	for _, program := range programs {
		if !strings.Contains(sets, "/"+program+"\n") {
			t.Errorf("--remove-initialized-key has also removed the DaemonSet %s:\n%s", program, sets)
		}
	}
	for _, program := range programs {
		c.Kubectl("-n", "kube-system", "delete", "daemonset", program)
		for _, n := range c.Nodes {
			c.Eventually(rolloutBudget, program+" is a static pod on "+n.Name+", and ready", func() error {
				out, err := c.TryGbctl("-n", n.Address.String(), "get", "staticpodstatus", "kube-system/"+program+"-"+n.Name)
				if err == nil && !e2etest.Row(out, "True") {
					err = errors.New(out)
				}
				return err
			})
		}
		m.Reached(program + " is a static pod")
	}
	converted(c)
	if after, err := c.ContainerID(e2etest.Web); err != nil || after != before {
		t.Errorf("the conversion has replaced container %s by %s: %v", before, after, err)
	}
}

// defined returns nil if a node has the definitions of static pods, and the bootstrap manifests.
func defined(c *e2etest.Cluster, n qemu.Node) error {
	pods, err := c.TryGbctl("-n", n.Address.String(), "get", "staticpods")
	for _, program := range programs {
		if err == nil && !e2etest.Row(pods, program) {
			err = fmt.Errorf("static pods are\n%s", pods)
		}
	}
	manifests, merr := c.TryGbctl("-n", n.Address.String(), "get", "manifests")
	if merr == nil && !e2etest.Row(manifests, "10-kube-proxy") {
		merr = fmt.Errorf("manifests are\n%s", manifests)
	}
	return errors.Join(err, merr)
}

// annotated takes the annotations of pod-checkpointer from two programs, as early clusters have
// them, and gives them back in the documented way (S-195): then their pods have checkpoints.
func annotated(c *e2etest.Cluster) {
	c.T().Helper()
	for _, way := range []struct {
		there bool
		patch []string
	}{
		{false, []string{"--type=json", "--patch", `[{"op": "remove", "path": "/spec/template/metadata/annotations/checkpointer.alpha.coreos.com~1checkpoint"}]`}},
		{true, []string{"--patch", `{"spec": {"template": {"metadata": {"annotations": {"checkpointer.alpha.coreos.com/checkpoint": "true"}}}}}`}},
	} {
		c.Kubectl(append([]string{"-n", "kube-system", "patch", "daemonset", "kube-scheduler", "kube-controller-manager"}, way.patch...)...)
		for _, program := range []string{"kube-scheduler", "kube-controller-manager"} {
			c.Eventually(rolloutBudget, "the pods of "+program+" are new", func() error {
				_, err := c.Try("-n", "kube-system", "rollout", "status", "daemonset", program, "--timeout=10s")
				return err
			})
			for _, n := range c.Nodes {
				c.Eventually(podBudget, fmt.Sprintf("the pod of %s on %s has a checkpoint: %v", program, n.Name, way.there), func() error {
					return checkpointed(c, n, program, way.there)
				})
			}
		}
	}
}

// checkpointed returns nil if there is a checkpoint of the pod that a DaemonSet has on a node, or isn't.
func checkpointed(c *e2etest.Cluster, n qemu.Node, program string, want bool) error {
	// a checkpoint has the same labels
	const owned = `jsonpath={.items[?(@.metadata.ownerReferences[0].kind=="DaemonSet")].metadata.name}`
	pod, err := c.Try("-n", "kube-system", "get", "pods", "-l", "k8s-app="+program, "--field-selector=spec.nodeName="+n.Name, "-o", owned)
	if err != nil {
		return err
	}
	files, err := c.TryGbctl("-n", n.Address.String(), "ls", "/var/lib/pod-checkpointer/inactive")
	if err == nil && strings.Contains(files, "kube-system-"+pod+".json") != want {
		err = fmt.Errorf("checkpoints are, with pod %q:\n%s", pod, files)
	}
	return err
}

// completing is the patch for the configuration of a self-hosted control plane.
func completing(c *e2etest.Cluster) string {
	t := c.T()
	t.Helper()
	t.Chdir(t.TempDir())
	e2etest.Gbctl(t, "gen", "ca", "--ecdsa", "--organization", "front-proxy", "--name", "aggregator")
	file := func(name string) string {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return base64.StdEncoding.EncodeToString(data)
	}
	image := func(program string) string {
		return c.Kubectl("-n", "kube-system", "get", "daemonset", program, "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	}
	key := c.Kubectl("-n", "kube-system", "get", "secret", "kube-controller-manager", "-o", `jsonpath={.data.service-account\.key}`)
	return fmt.Sprintf("cluster: {serviceAccount: {key: %s}, aggregatorCA: {crt: %s, key: %s}, apiServer: {image: %s}, controllerManager: {image: %s}, scheduler: {image: %s}}",
		key, file("aggregator.crt"), file("aggregator.key"), image(programs[0]), image(programs[1]), image(programs[2]))
}
