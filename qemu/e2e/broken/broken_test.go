//go:build e2e

// Package broken breaks one node in many ways, one after the other. Each time gbctl doctor must say what is the matter,
// and what it says must heal the node.
package broken

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// tellBudget is for a fault to be detected: an API server that is replaced may use its whole grace period of 30 s,
	// and what the boot may explain is no fault for five minutes.
	tellBudget = 5 * time.Minute
	// mendBudget is for what was repaired to work again: the kubelet restarts a container with growing pauses.
	mendBudget = 90 * time.Second
)

// fault is a row: how a node is broken, what the doctor must tell, and what heals it.
type fault struct {
	name, breaks       string // commands, separated by " ; "; a manifest begins with "apiVersion"
	severity, id, word string
	// commands, of which the finding's next names the first, unless told says another part of it
	heals string
	told  string
}

// faults are of one node. GONE is an address of its network at which nobody is, NODE its name, and IMAGE one that it
// has.
var faults = []fault{
	{"etcd is stopped", "gbctl service etcd stop --force", "ERROR", "service-stopped", "etcd was stopped", "gbctl service etcd start", ""},
	{"the kubelet is stopped", "gbctl service kubelet stop", "ERROR", "service-stopped", "kubelet was stopped", "gbctl service kubelet start", ""},
	{"containerd is stopped", "gbctl service containerd stop", "ERROR", "service-stopped", "containerd was stopped", "gbctl service containerd start", ""},
	{"the clock's service is stopped", "gbctl service timed stop", "WARNING", "service-stopped", "timed was stopped", "gbctl service timed start", ""},
	{"the resolver is stopped", "gbctl service resolver stop", "WARNING", "service-stopped", "resolver was stopped", "gbctl service resolver start", ""},
	{"trustd is stopped", "gbctl service trustd stop", "WARNING", "service-stopped", "trustd was stopped", "gbctl service trustd start", ""},
	{"the only name server is dead", `patch {"machine":{"network":{"nameservers":["GONE"]}}}`, "ERROR", "nameserver-silent", "GONE:53", "gbctl config rollback", "machine.network.nameservers"},
	{"a mirror is dead", `patch {"machine":{"registries":{"mirrors":{"docker.io":{"endpoints":["http://GONE:5000"]}}}}}`, "WARNING", "registry-silent", "GONE:5000", "gbctl config rollback", "machine.registries"},
	{"an image that isn't there", "kubectl run broken --image=registry.k8s.io/none:v1", "WARNING", "image-pull-failing", "pod default/broken", "kubectl delete pod broken --now", "Correct the image's name"},
	{"an image's name that is none", object("v1", "Pod", "broken", `"spec":{"containers":[{"name":"broken","image":"Not/An/Image"}]}`), "WARNING", "image-pull-failing", "pod default/broken", "kubectl delete pod broken --now", "Correct"},
	{"a container that ends", "kubectl run broken --image=IMAGE -- --no-such-flag", "WARNING", "pods-failing", "CrashLoopBackOff", "kubectl delete pod broken --now", "kubectl -n default logs broken"},
	{"a program that isn't in the image", "kubectl run broken --image=IMAGE --command -- /none", "WARNING", "pods-failing", "RunContainerError", "kubectl delete pod broken --now", "describe pod broken"},
	{"a ConfigMap that isn't there", pod(`"envFrom":[{"configMapRef":{"name":"none"}}]`), "WARNING", "pods-failing", "CreateContainerConfigError", "kubectl create configmap none ; kubectl delete pod broken --now ; kubectl delete configmap none", "describe pod broken"},
	{"an image of a system pod", "kubectl -n kube-system set image daemonset/kube-proxy kube-proxy=registry.k8s.io/kube-proxy:v0.0.0", "ERROR", "image-pull-failing", "kube-system/kube-proxy", "kubectl -n kube-system rollout undo daemonset/kube-proxy", "Correct the image's name"},
	{"the node is cordoned", "kubectl cordon NODE", "WARNING", "node-cordoned", "cordoned", "kubectl uncordon NODE", ""},
	{"the Node is deleted", "kubectl delete node NODE", "ERROR", "node-not-registered", "doesn't know the node", "gbctl service kubelet restart", ""},
	{"a webhook has no pods", hook(`"service":{"namespace":"default","name":"none"}`), "ERROR", "webhook-without-pods", "default/none", "kubectl delete validatingwebhookconfiguration broken", ""},
	{"a webhook's server is dead", hook(`"url":"https://GONE:8443/"`), "ERROR", "webhook-without-pods", "GONE:8443", "kubectl delete validatingwebhookconfiguration broken", ""},
	{"an APIService has no pods", object("apiregistration.k8s.io/v1", "APIService", "v1.broken.example", `"spec":{"group":"broken.example","version":"v1","groupPriorityMinimum":100,"versionPriority":100,"insecureSkipTLSVerify":true,"service":{"namespace":"default","name":"none"}}`),
		"WARNING", "apiservice-without-pods", "default/none", "kubectl delete apiservice v1.broken.example", ""},
	{"an argument of the kubelet", `patch {"machine":{"kubelet":{"extraArgs":{"no-such-flag":"1"}}}}`, "ERROR", "kubelet-not-running", "unknown flag: --no-such-flag", "gbctl config rollback", "machine.kubelet.extraArgs"},
	{"an argument of the scheduler", `patch {"cluster":{"scheduler":{"extraArgs":{"no-such-flag":"1"}}}}`, "ERROR", "scheduler-not-running", "unknown flag: --no-such-flag", "gbctl config rollback", "cluster.scheduler.extraArgs"},
	{"an argument of the controller manager", `patch {"cluster":{"controllerManager":{"extraArgs":{"no-such-flag":"1"}}}}`, "ERROR", "controller-manager-not-running", "unknown flag: --no-such-flag", "gbctl config rollback", "cluster.controllerManager.extraArgs"},
	{"an argument of etcd", `patch {"cluster":{"etcd":{"extraArgs":{"no-such-flag":"1"}}}}`, "ERROR", "etcd-not-running", "no-such-flag", "gbctl config rollback", "cluster.etcd.extraArgs"},
	{"an image of the kubelet", `patch {"machine":{"kubelet":{"image":"registry.k8s.io/none:v1.37.1"}}}`, "ERROR", "image-pull-failing", "The former one goes on", "gbctl config rollback", "Correct the image's name"},
	{"an image of etcd", `patch {"cluster":{"etcd":{"image":"registry.k8s.io/none:v3.6.1"}}}`, "ERROR", "image-pull-failing", "The former one goes on", "gbctl config rollback", "Correct the image's name"},
	{"an image of the scheduler", `patch {"cluster":{"scheduler":{"image":"registry.k8s.io/none:v1.37.1"}}}`, "ERROR", "image-pull-failing", "The former one goes on", "gbctl config rollback", "Correct the image's name"},
	{"an image that isn't a kubelet", `patch {"machine":{"kubelet":{"image":"IMAGE"}}}`, "ERROR", "image-sick", "The new image for service kubelet doesn't work. The former one goes on", "gbctl config rollback", "Correct the image"},
	{"an image that isn't an etcd", `patch {"cluster":{"etcd":{"image":"IMAGE"}}}`, "ERROR", "image-sick", "The new image for service etcd doesn't work. The former one goes on", "gbctl config rollback", "Correct the image"},
	{"an image that isn't a scheduler", `patch {"cluster":{"scheduler":{"image":"IMAGE"}}}`, "ERROR", "image-sick", "The new image for static pod kube-scheduler doesn't work. The former one goes on", "gbctl config rollback", "Correct the image"},
	{"a sysctl that isn't there", `patch {"machine":{"sysctls":{"net.core.none":"1"}}}`, "INFO", "problem-stays", "net.core.none", "gbctl config rollback", "It should pass by itself before"},
	{"a manifest's URL is dead", `patch {"cluster":{"extraManifests":["http://GONE/none.yaml"]}}`, "WARNING", "controller-failing", "GONE", "gbctl config rollback", "cluster.extraManifests"},
	{"a change is being tried", `try {"machine":{"sysctls":{"net.core.somaxconn":"1024"}}}`, "WARNING", "configuration-tried", "is undone in", "gbctl config rollback", ""},
	{"a change waits for a boot", `boot {"machine":{"sysctls":{"net.core.somaxconn":"1024"}}}`, "INFO", "configuration-staged", "next boot", "gbctl config rollback", "gbctl -n"},
}

func object(version, kind, name, more string) string {
	return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q},%s}`, version, kind, name, more)
}

func pod(more string) string {
	return object("v1", "Pod", "broken", `"spec":{"containers":[{"name":"broken","image":"IMAGE",`+more+`}]}`)
}

// hook concerns an API group that nobody has.
func hook(config string) string {
	return object("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "broken",
		`"webhooks":[{"name":"broken.example.org","clientConfig":{`+config+`},"rules":[{"apiGroups":["broken.example"],"apiVersions":["*"],"operations":["*"],"resources":["*"]}],"sideEffects":"None","admissionReviewVersions":["v1"]}]`)
}

// finding is a finding in gbctl doctor -o yaml.
type finding struct {
	Severity, ID, What, Why, Next string
	Evidence                      []string
}

func (f finding) String() string {
	return fmt.Sprintf("%s %s: %s\n  why: %s\n  next: %s\n  %s", f.Severity, f.ID, f.What, f.Why, f.Next, strings.Join(f.Evidence, "\n  "))
}

func diagnose(c *e2etest.Cluster) (found []finding, err error) {
	out, failed := c.TryGbctl("doctor", "-o", "yaml")
	var document struct{ Findings []finding }
	if err := yaml.Unmarshal([]byte(out), &document); err != nil {
		return nil, fmt.Errorf("gbctl doctor: %w, %w: %s", err, failed, out)
	}
	return document.Findings, nil
}

func all(found []finding) string {
	var out []string
	for _, f := range found {
		out = append(out, f.String())
	}
	return strings.Join(out, "\n")
}

// run runs commands as a user does.
func run(c *e2etest.Cluster, commands string) {
	for command := range strings.SplitSeq(commands, " ; ") {
		verb, rest, _ := strings.Cut(command, " ")
		switch {
		case strings.HasPrefix(command, "{"):
			c.Apply(command)
		case verb == "gbctl":
			c.Gbctl(strings.Fields(rest)...)
		case verb == "kubectl":
			c.Kubectl(strings.Fields(rest)...)
		default:
			mode := map[string][]string{"patch": nil, "try": {"--mode=try"}, "boot": {"--on-reboot"}}[verb]
			c.Gbctl(append([]string{"patch", "mc", "-p", rest}, mode...)...)
		}
	}
}

func well(c *e2etest.Cluster) {
	c.Eventually(mendBudget, "gbctl doctor finds nothing", func() error {
		found, err := diagnose(c)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("it tells:\n%s", all(found))
		}
		return err
	})
}

func TestBrokenNode(t *testing.T) {
	c, _ := e2etest.Ready(t, "broken", qemu.Container)
	well(c)
	if out, err := c.TryGbctl("service", "etcd", "stop"); err == nil {
		t.Errorf("the only member of etcd is stopped: %s", out)
	}
	gone := c.Plan.Network.Masked().Addr()
	for range 250 {
		gone = gone.Next()
	}
	words := strings.NewReplacer("GONE", gone.String(), "NODE", c.Node(), "IMAGE", config.DefaultCoreDNSImage)
	for _, row := range faults {
		t.Run(strings.ReplaceAll(row.name, " ", "-"), func(t *testing.T) {
			c, began := c.In(t), time.Now()
			heals := words.Replace(row.heals)
			// What runs it may say how it reaches the node.
			first, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(heals, "gbctl "), "kubectl "), " ; ")
			run(c, words.Replace(row.breaks))
			c.Eventually(tellBudget, "gbctl doctor tells of "+row.id, func() error {
				found, err := diagnose(c)
				if err != nil {
					return err
				}
				at := slices.IndexFunc(found, func(f finding) bool {
					return f.ID == row.id && strings.HasSuffix(strings.ToUpper(f.Severity), row.severity) && strings.Contains(f.String(), words.Replace(row.word)) &&
						strings.Contains(f.Next, cmp.Or(row.told, first))
				})
				if at != 0 {
					return fmt.Errorf("it tells:\n%s", all(found))
				}
				for _, f := range found[1:] { // nothing else is as bad: the others follow from it
					if !strings.HasSuffix(strings.ToUpper(f.Severity), "INFO") {
						return fmt.Errorf("it has another root:\n%s", all(found))
					}
				}
				t.Logf("after %.1f s:\n%s", time.Since(began).Seconds(), all(found))
				return nil
			})
			told := time.Now()
			run(c, heals)
			well(c)
			t.Logf("told after %.1f s, healed after %.1f s", told.Sub(began).Seconds(), time.Since(told).Seconds())
		})
	}
}
