//go:build e2e && long

// Package versions tests a cluster of an older version of Kubernetes, its upgrade to the
// version of this release, and the way back. Its nodes can pull the images of both.
package versions

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// podBudget is for a pod to be scheduled and to be ready.
	podBudget = 20 * time.Second
	// upgradeBudget is for the whole operation: the first node of each of three programs is
	// watched for half a minute.
	upgradeBudget = 6 * time.Minute
	// wideBudget is for four nodes, whose kubelets change one after another.
	wideBudget  = 20 * time.Minute
	writeBudget = 30 * time.Second
	// silence is the promise to clients of the load balancer: how long an upgrade may take the
	// API server from them.
	silence = 2 * time.Second
	// versionBudget is for all programs to be of a version: they pull its images and start.
	versionBudget = 90 * time.Second
)

// the older version accepts all that a node renders.
func TestQ16OtherKubernetes(t *testing.T) {
	c, m := e2etest.Ready(t, "versions", qemu.Container, ownManagers(t)...)
	inside := c.Network()
	before := c.RunWeb(podBudget, withVersion(config.DefaultAPIServerImage, components.OtherKubernetesVersion))
	c.Eventually(versionBudget, "all is "+components.OtherKubernetesVersion, func() error {
		return runs(c, inside, components.OtherKubernetesVersion, components.OtherKubernetesVersion)
	})
	m.Reached("a pod runs on " + components.OtherKubernetesVersion)
	refused(c)
	m.Reached("versions that aren't there are refused")

	node := c.Nodes[0].Address.String()
	t.Log(c.Gbctl("-n", node, "upgrade-k8s", "--to", plain(config.KubernetesVersion), "--dry-run"))
	for _, w := range ways {
		if w.before != nil {
			w.before(c)
		}
		s := c.Session(append([]string{"-n", node, "upgrade-k8s", "--to", plain(w.to)}, w.flags...)...)
		if w.answer != "" {
			s.Asks(upgradeBudget, "apply the bootstrap manifests to these 1 objects?")
			s.Type(w.answer)
		}
		if err := s.End(upgradeBudget); err != nil {
			t.Fatalf("%v\n%s", err, s.Text())
		}
		c.Golden(w.golden, s.Text())
		for _, program := range w.replaced {
			if step := stepOf(s.Text(), program); !mismatch.MatchString(step) {
				t.Errorf("nothing says that %s has the former configuration for a while:\n%s", program, step)
			}
		}
		if err := runs(c, inside, w.to, w.kubelet); err != nil {
			t.Errorf("after the operation: %v", err)
		}
		w.after(c)
		c.Eventually(podBudget, "the pod is ready", func() error {
			after, err := c.ContainerID(e2etest.Web)
			if err == nil && after != before {
				t.Errorf("the change has replaced container %s by %s", before, after)
			}
			return err
		})
		m.Reached("the same pod runs on " + w.to + ", on a kubelet " + w.kubelet)
	}
	c.Golden("upgrade-k8s-fails", diesLate(c))
	m.Reached("a controller manager that fails late has its former image")
}

// a node of the oldest version runs its programs, its DNS and a pod, and nothing of its
// configuration is refused.
func TestQ16OldestKubernetes(t *testing.T) {
	const version = components.OldestKubernetesVersion
	c, m := e2etest.Ready(t, "oldest", qemu.Container, e2etest.Kubernetes(t, version))
	c.RunWeb(podBudget, withVersion(config.DefaultAPIServerImage, version))
	m.Reached("a pod runs on " + version)
	c.Healthy()
	if err := runs(c, c.Network(), version, version); err != nil {
		t.Error(err)
	}
	c.Eventually(versionBudget, "CoreDNS is there", func() error {
		_, err := c.Try("-n", "kube-system", "rollout", "status", "deployment", "coredns", "--timeout=10s")
		return err
	})
	is(c, "2", "deployment/coredns", "{.status.availableReplicas}")
	c.Eventually(versionBudget, "nothing is wrong", func() error {
		out, err := c.TryGbctl("doctor")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	m.Reached("nothing is wrong")
}

// refused: an upgrade that can't be is refused, and nothing changes.
func refused(c *e2etest.Cluster) {
	t, node := c.T(), c.Nodes[0].Address.String()
	t.Helper()
	for _, wrong := range []struct {
		says  string
		flags []string
	}{
		{"images", []string{"--to", missing}}, // no registry has it
		// S-315: what the node is told, and not what it has.
		{"from v1.35.4 to " + config.KubernetesVersion + " is more than one minor version", []string{"--from", "1.35.4", "--to", plain(config.KubernetesVersion)}},
		{
			"kube-apiserver has version " + components.OtherKubernetesVersion + ", and not v1.36.99 or " + config.KubernetesVersion,
			[]string{"--from", "1.36.99", "--to", plain(config.KubernetesVersion)},
		},
	} {
		before := c.Gbctl("-n", node, "get", "mc", "-o", "yaml")
		out, err := c.Patient(upgradeBudget).TryGbctl(append([]string{"-n", node, "upgrade-k8s"}, wrong.flags...)...)
		if err == nil || !strings.Contains(fmt.Sprint(out, err), wrong.says) {
			t.Errorf("upgrade-k8s %v: %v\n%s", wrong.flags, err, out)
		}
		if now := c.Gbctl("-n", node, "get", "mc", "-o", "yaml"); now != before {
			t.Errorf("upgrade-k8s %v has changed the configuration:\n%s\nIt was\n%s", wrong.flags, now, before)
		}
	}
}

// A way is one upgrade of the same cluster. The bootstrap manifests have something otherwise
// than the cluster, and the step that compares them asks, or has its answer.
type way struct {
	golden, to string
	flags      []string
	before     func(*e2etest.Cluster) // makes the difference
	answer     string
	kubelet    string   // the version of the kubelet afterwards
	replaced   []string // the static pods that the upgrade replaces
	after      func(*e2etest.Cluster)
}

var programs = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// S-315, S-316, S-317, S-321, S-323: the control plane alone, then the kubelet, then all back.
var ways = []way{
	{
		golden: "upgrade-k8s-no-kubelet", to: config.KubernetesVersion, kubelet: components.OtherKubernetesVersion, replaced: programs,
		flags:  []string{"--from", plain(components.OtherKubernetesVersion), "--no-kubelet"},
		before: untolerant, answer: "yes",
		after: func(c *e2etest.Cluster) {
			is(c, `[{"operator":"Exists"}]`, "daemonset/kube-proxy", "{.spec.template.spec.tolerations}")
			is(c, "1 1 1", "daemonset/kube-proxy", "{.status.desiredNumberScheduled} {.status.updatedNumberScheduled} {.status.numberAvailable}")
		},
	},
	{
		golden: "upgrade-k8s-to-" + config.KubernetesVersion, to: config.KubernetesVersion, kubelet: config.KubernetesVersion,
		before: func(c *e2etest.Cluster) {
			c.Kubectl("-n", "kube-system", "scale", "deployment", "coredns", "--replicas=1")
		},
		answer: "no",
		after:  func(c *e2etest.Cluster) { is(c, "1", "deployment/coredns", "{.spec.replicas}") },
	},
	{
		golden: "upgrade-k8s-to-" + components.OtherKubernetesVersion, to: components.OtherKubernetesVersion, kubelet: components.OtherKubernetesVersion,
		replaced: programs, flags: []string{"--yes"}, // and the difference is still there
		after: func(c *e2etest.Cluster) {
			is(c, "2 2 2", "deployment/coredns", "{.spec.replicas} {.status.updatedReplicas} {.status.availableReplicas}")
		},
	},
}

// untolerant gives kube-proxy the toleration that clusters before S-321 have.
func untolerant(c *e2etest.Cluster) {
	c.T().Helper()
	c.Kubectl("-n", "kube-system", "patch", "daemonset", "kube-proxy", "--type=json", "-p",
		`[{"op": "replace", "path": "/spec/template/spec/tolerations", "value": [{"key": "node-role.kubernetes.io/master", "operator": "Exists", "effect": "NoSchedule"}]}]`)
}

// is checks a part of an object in kube-system.
func is(c *e2etest.Cluster, want, object, path string) {
	c.T().Helper()
	if got := c.Kubectl("-n", "kube-system", "get", object, "-o", "jsonpath="+path); got != want {
		c.T().Errorf("%s has %s %s, want %s", object, path, got, want)
	}
}

// mismatch is the line about a static pod that the kubelet hasn't replaced yet (S-316).
var mismatch = regexp.MustCompile(`(?m)^\S+:     \S+: retrying error: config version mismatch: got "\d+", expected "\d+"$`)

// stepOf is the part of a transcript about one step.
func stepOf(text, step string) string {
	_, text, _ = strings.Cut(text, ":   … "+step+": ")
	text, _, _ = strings.Cut(text, ":   ✓ "+step+" done")
	return text
}

// ownManager is an image of a registry of the user's own. In the new version it has a program
// that fails when it has been healthy for a while.
const ownManager = "registry.example/own/manager:" + config.KubernetesVersion

// ownManagers are the options for nodes that can pull it.
func ownManagers(t *testing.T) []e2etest.Option {
	return []e2etest.Option{
		e2etest.OtherKubernetes(t),
		e2etest.WithName(t, withVersion(ownManager, components.OtherKubernetesVersion), withVersion(config.DefaultControllerManagerImage, components.OtherKubernetesVersion)),
		e2etest.WithProgram(t, ownManager, "dying", "usr/local/bin/kube-controller-manager"),
	}
}

// diesLate: the upgrade stops at the first control plane, and its controller manager has the
// former image again. The others have it all the time.
func diesLate(c *e2etest.Cluster) (transcript string) {
	t := c.T()
	t.Helper()
	former := withVersion(ownManager, components.OtherKubernetesVersion)
	useManager(c, former)
	hasManager(c, former)
	s := c.Session("-n", c.Nodes[0].Address.String(), "upgrade-k8s", "--to", plain(config.KubernetesVersion))
	if err := s.End(upgradeBudget); err == nil {
		t.Errorf("the upgrade succeeds")
	}
	if n := strings.Count(s.Text(), "… kube-controller-manager "); n != 1 {
		t.Errorf("the upgrade has changed the controller manager of %d nodes:\n%s", n, s.Text())
	}
	hasManager(c, former)
	for _, n := range c.ControlPlanes() {
		if text := c.Gbctl("-n", n.Address.String(), "get", "mc", "-o", "yaml"); strings.Contains(text, ownManager) {
			t.Errorf("the configuration of %s has the image that fails:\n%s", n.Name, text)
		}
	}
	return s.Text()
}

// useManager gives all control planes an image for the controller manager. One node after another is healthy with it.
// Where two images have the same content, containerd has one name for both.
func useManager(c *e2etest.Cluster, image string) {
	c.T().Helper()
	var nodes []string
	for _, n := range c.ControlPlanes() {
		nodes = append(nodes, n.Address.String())
	}
	c.Patient(upgradeBudget).Gbctl("-n", strings.Join(nodes, ","), "patch", "mc", "-p", "cluster: {controllerManager: {image: \""+image+"\"}}")
	c.Healthy()
}

// hasManager waits until all control planes run an image as the controller manager.
func hasManager(c *e2etest.Cluster, image string) {
	c.T().Helper()
	for _, n := range c.ControlPlanes() {
		c.Eventually(versionBudget, image+" runs on "+n.Name, func() error {
			pods, err := c.TryGbctl("-n", n.Address.String(), "containers", "-k")
			if err == nil && !e2etest.Row(pods, image, "CONTAINER_RUNNING") {
				err = fmt.Errorf("containers are\n%s", pods)
			}
			return err
		})
	}
	c.Healthy()
}

// One command moves three control planes and a worker to another version while clients write:
// nothing that was acknowledged is lost. An upgrade that failed before that has changed one
// node, and has changed it back.
func TestUpgradeUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "upgrade3", qemu.Container, append(ownManagers(t), e2etest.Nodes(3, 1))...)
	c.Healthy()
	m.Reached("all control planes serve")
	load := c.Write(e2etest.KubernetesStore(c.Endpoint()))
	load.Goes(writeBudget, "before the upgrade")
	t.Log(diesLate(c))
	m.Reached("an upgrade has failed at the first node")
	useManager(c, withVersion(config.DefaultControllerManagerImage, components.OtherKubernetesVersion))
	load.Goes(writeBudget, "after the upgrade that failed")
	out, err := c.Patient(wideBudget).TryGbctl("-n", c.Nodes[1].Address.String(), "upgrade-k8s", "--to", plain(config.KubernetesVersion), "--yes")
	t.Log(out)
	if err != nil {
		t.Fatal(err)
	}
	longest := load.Longest() // Goes begins a new one
	m.Reached("all nodes run " + config.KubernetesVersion)
	if err := runs(c, c.Network(), config.KubernetesVersion, config.KubernetesVersion); err != nil {
		t.Errorf("after the upgrade: %v", err)
	}
	for _, n := range c.Nodes {
		if text := c.Gbctl("-n", n.Address.String(), "get", "mc", "-o", "yaml"); strings.Contains(text, components.OtherKubernetesVersion) {
			t.Errorf("the configuration of %s has the former version:\n%s", n.Name, text)
		}
	}
	load.Goes(writeBudget, "after the upgrade")
	load.Stop()
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": load.Read})
	t.Logf("the longest time without an acknowledged write was %s", longest.Took)
	if err := c.Promised(longest.From, longest.From.Add(longest.Took), silence); err != nil {
		t.Errorf("without an acknowledged write: %v", err)
	}
}

// missing is a version that no registry has.
const missing = "1.37.99"

// plain is a version without its v.
func plain(version string) string { return strings.TrimPrefix(version, "v") }

// withVersion returns a default image of Kubernetes, of another version.
func withVersion(image, version string) string {
	return strings.TrimSuffix(image, config.KubernetesVersion) + version
}

// staticPods are the default images of the static pods.
var staticPods = []string{config.DefaultAPIServerImage, config.DefaultControllerManagerImage, config.DefaultSchedulerImage}

// runs returns nil if all nodes run a version: kube-proxy and its DaemonSet, the static pods, and
// no others, each API server by its own account, and the kubelets theirs.
func runs(c *e2etest.Cluster, inside *osthread.Thread, version, kubelet string) error {
	image, err := c.Try("-n", "kube-system", "get", "daemonset", "kube-proxy", "-o", "jsonpath={.spec.template.spec.containers[*].image}")
	if err == nil && image != withVersion(config.DefaultProxyImage, version) {
		err = fmt.Errorf("the DaemonSet of kube-proxy has %s", image)
	}
	for _, n := range c.Nodes {
		if err == nil {
			err = nodeRuns(c, inside, n, version, kubelet)
		}
	}
	return err
}

func nodeRuns(c *e2etest.Cluster, inside *osthread.Thread, n qemu.Node, version, kubelet string) error {
	images := []string{config.DefaultProxyImage}
	if n.Type != string(config.Worker) {
		images = append(images, staticPods...)
		answer, err := c.Server(inside, n).Get(c.T().Context(), "/version")
		if err != nil {
			return err
		}
		var server struct{ GitVersion string }
		if err := json.Unmarshal(answer, &server); err != nil || server.GitVersion != version {
			return fmt.Errorf("the API server of %s is %s (%v)", n.Name, server.GitVersion, err)
		}
	}
	has, err := c.Try("get", "node", n.Name, "-o", "jsonpath={.status.nodeInfo.kubeletVersion}")
	if err == nil && has != kubelet {
		err = fmt.Errorf("the kubelet of %s is %s", n.Name, has)
	}
	if err != nil {
		return err
	}
	pods, err := c.TryGbctl("-n", n.Address.String(), "containers", "-k")
	if err != nil {
		return err
	}
	for _, image := range images {
		if running := runningOf(pods, image); !slices.Equal(running, []string{withVersion(image, version)}) {
			return fmt.Errorf("%s runs %q, and not %s alone:\n%s", n.Name, running, withVersion(image, version), pods)
		}
	}
	return nil
}

// runningOf are the images of a program's containers that run in kube-system, of any version.
func runningOf(containers, image string) (all []string) {
	for line := range strings.Lines(containers) {
		if !strings.Contains(line, " kube-system/") || !strings.Contains(line, "CONTAINER_RUNNING") {
			continue
		}
		for _, field := range strings.Fields(line) {
			if strings.HasPrefix(field, withVersion(image, "")) {
				all = append(all, field)
			}
		}
	}
	return all
}
