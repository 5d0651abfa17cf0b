//go:build e2e

// Package upgrade tests what an old cluster goes through on one node: its self-hosted control
// plane becomes static pods, Kubernetes is upgraded, and goes down again. The long tests of
// packages convert and versions do that with other code, with more nodes, and with
// interruptions.
package upgrade

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podBudget = 60 * time.Second
	// askBudget is for the conversion to ask, and convertBudget for what follows.
	askBudget     = 5 * time.Minute
	convertBudget = 10 * time.Minute
	// upgradeBudget is for the whole operation: the first node of each of three programs is
	// watched for half a minute.
	upgradeBudget = 6 * time.Minute
	// versionBudget is for all programs to be of a version: they pull its images and start.
	versionBudget = 90 * time.Second
)

// former is the version that the cluster begins with: the code of the default one, under
// another name.
const former = components.RelinkedKubernetesVersion

// programs are the static pods of a control plane, with their default images.
var programs = map[string]string{
	"kube-apiserver":          config.DefaultAPIServerImage,
	"kube-controller-manager": config.DefaultControllerManagerImage,
	"kube-scheduler":          config.DefaultSchedulerImage,
}

// withVersion returns a default image of Kubernetes, of another version.
func withVersion(image, version string) string {
	return strings.TrimSuffix(image, config.KubernetesVersion) + version
}

func TestOldClusterOfOneNode(t *testing.T) {
	c, m := e2etest.Ready(t, "old", qemu.Container, e2etest.SelfHosted(t), e2etest.RelinkedKubernetes(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot")
	pod := c.RunWeb(podBudget, withVersion(config.DefaultAPIServerImage, former))
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		name string
		run  func(*e2etest.Cluster)
	}{
		{"S-301 the control plane becomes static pods", converts},
		{"S-316 the operation goes up", upgrades},
		{"S-323 a configuration goes down", goesDown},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(c.In(t)) }) {
			t.FailNow() // the next part needs what this one has made
		}
		m.Reached(part.name)
		c.Eventually(podBudget, "the pod is ready", func() error {
			now, err := c.ContainerID(e2etest.Web)
			if err == nil && now != pod {
				t.Errorf("%s: container %s is replaced by %s", part.name, pod, now)
			}
			return err
		})
	}
	now, err := c.Status(t.Context())
	if err != nil || now[0].Restarts != status[0].Restarts {
		t.Errorf("the node has started again: %+v, %v", now, err)
	}
}

// converts: S-290 to S-303.
func converts(c *e2etest.Cluster) {
	t := c.T()
	if out := c.Gbctl("get", "bs"); !strings.Contains(out, "true") {
		t.Fatalf("the control plane isn't self-hosted:\n%s", out)
	}
	s := c.Session("-n", c.Nodes[0].Address.String(), "convert-k8s", "--remove-checkpoints")
	for _, question := range []string{"confirm disabling pod-checkpointer", "confirm applying static pod definitions"} {
		s.Asks(askBudget, question)
		s.Type("yes")
	}
	if err := s.End(convertBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	c.Golden("convert-k8s", s.Text())
	if out := c.Gbctl("get", "bs"); strings.Contains(out, "true") {
		t.Errorf("the control plane is still self-hosted:\n%s", out)
	}
	sets := c.Kubectl("-n", "kube-system", "get", "daemonsets", "-o", "name")
	pods := c.Kubectl("-n", "kube-system", "get", "pods", "-o", "name")
	for program := range programs {
		if strings.Contains(sets, "/"+program) || !strings.Contains(pods, "pod/"+program+"-"+c.Node()) {
			t.Errorf("%s isn't a static pod only:\n%s\n%s", program, sets, pods)
		}
	}
	if strings.Contains(sets+pods, "pod-checkpointer") {
		t.Errorf("pod-checkpointer is still there:\n%s\n%s", sets, pods)
	}
	if err := runs(c, former); err != nil {
		t.Error(err)
	}
}

// mismatch is the line about a static pod that the kubelet hasn't replaced yet.
var mismatch = regexp.MustCompile(`(?m)^\S+:     \S+: retrying error: config version mismatch: got "\d+", expected "\d+"$`)

// upgrades: S-316, S-317, S-321. kube-proxy has the toleration of clusters before S-321.
func upgrades(c *e2etest.Cluster) {
	t := c.T()
	c.Healthy() // the programs have just become static pods
	c.Kubectl("-n", "kube-system", "patch", "daemonset", "kube-proxy", "--type=json", "-p",
		`[{"op": "replace", "path": "/spec/template/spec/tolerations", "value": [{"key": "node-role.kubernetes.io/master", "operator": "Exists", "effect": "NoSchedule"}]}]`)
	s := c.Session("-n", c.Nodes[0].Address.String(), "upgrade-k8s", "--to", strings.TrimPrefix(config.KubernetesVersion, "v"))
	s.Asks(upgradeBudget, "apply the bootstrap manifests to these 1 objects?")
	s.Type("yes")
	if err := s.End(upgradeBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	c.Golden("upgrade-k8s", s.Text())
	if !mismatch.MatchString(s.Text()) {
		t.Errorf("nothing says that a static pod has the former configuration for a while:\n%s", s.Text())
	}
	if err := runs(c, config.KubernetesVersion); err != nil {
		t.Errorf("after the operation: %v", err)
	}
	if got := c.Kubectl("-n", "kube-system", "get", "daemonset/kube-proxy", "-o", "jsonpath={.spec.template.spec.tolerations}"); got != `[{"operator":"Exists"}]` {
		t.Errorf("kube-proxy tolerates %s", got)
	}
	proxy := withVersion(config.DefaultProxyImage, config.KubernetesVersion)
	if out := c.Gbctl("containers", "-k"); !e2etest.Row(out, proxy, "CONTAINER_RUNNING") {
		t.Errorf("no %s runs:\n%s", proxy, out)
	}
}

// goesDown: S-322, S-323. What the configuration names is what runs.
func goesDown(c *e2etest.Cluster) {
	c.Patient(upgradeBudget).Gbctl("patch", "mc", "-p", fmt.Sprintf(`
machine: {kubelet: {image: %q}}
cluster: {apiServer: {image: %q}, controllerManager: {image: %q}, scheduler: {image: %q}}
`, withVersion(config.DefaultKubeletImage, former), withVersion(config.DefaultAPIServerImage, former),
		withVersion(config.DefaultControllerManagerImage, former), withVersion(config.DefaultSchedulerImage, former)))
	c.Eventually(versionBudget, "all is "+former+" again", func() error { return runs(c, former) })
}

// runs returns nil if the API server and the kubelet report a version, and the static pods run
// in it.
func runs(c *e2etest.Cluster, version string) error {
	answer, err := c.Endpoint().Get(c.T().Context(), "/version")
	if err != nil {
		return err
	}
	var server struct{ GitVersion string }
	if err := json.Unmarshal(answer, &server); err != nil || server.GitVersion != version {
		return fmt.Errorf("the API server is %s (%v)", answer, err)
	}
	kubelet, err := c.Try("get", "node", c.Node(), "-o", "jsonpath={.status.nodeInfo.kubeletVersion}")
	if err == nil && kubelet != version {
		err = fmt.Errorf("the kubelet is %s", kubelet)
	}
	if err != nil {
		return err
	}
	containers, err := c.TryGbctl("containers", "-k")
	for _, image := range programs {
		if err == nil && !e2etest.Row(containers, withVersion(image, version), "CONTAINER_RUNNING") {
			err = fmt.Errorf("no %s runs:\n%s", withVersion(image, version), containers)
		}
	}
	return err
}
