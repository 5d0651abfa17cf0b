//go:build e2e && long

// Package policies tests on a machine that NetworkPolicies are enforced with cluster.network.policies.
// The cases have the names of those of Kubernetes (test/e2e/network/netpol/network_policy.go).
package policies

import (
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	image = "registry.example/garboard/peer:1" // RFC 2606
	// runBudget is for pods to pull their image and run, and for the agent to know its policies.
	runBudget = 60 * time.Second
	// policyBudget is for a change of a policy to have an effect, with connections that time out meanwhile.
	policyBudget = 30 * time.Second

	name = "kubernetes.default.svc.cluster.local"
)

// peer is a pod that serves, and connects. The probe is the kubelet's: no policy keeps it off.
const peer = `
apiVersion: v1
kind: Pod
metadata: {name: %[2]s, namespace: %[1]s, labels: {pod: %[2]s}}
spec:
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: peer
    image: %[3]s
    command: [/peer, serve]
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 2, timeoutSeconds: 10, failureThreshold: 10}
---`

// cluster is one with the pods x/a, x/b and z/a.
type cluster struct {
	*e2etest.Cluster
	at map[string]string // addresses of pods
}

func TestNetworkPolicies(t *testing.T) {
	started, m := e2etest.Ready(t, "policies", qemu.QEMU, e2etest.Nodes(1, 0), e2etest.WithImage(t, image, "peer"), func(o *qemu.Options) {
		o.ControlPlanePatches = append(o.ControlPlanePatches, []byte("cluster: {network: {policies: true}}\n"))
	})
	c := cluster{started, map[string]string{}}
	node := c.Nodes[0].Address.String()
	c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: z}\n")
	pods := []string{"x/a", "x/b", "z/a"}
	for _, pod := range pods {
		space, pod, _ := strings.Cut(pod, "/")
		c.Apply(fmt.Sprintf(peer, space, pod, image))
	}
	for _, pod := range pods {
		c.Eventually(runBudget, pod+" is ready", func() (err error) { c.at[pod], err = c.ready(pod); return err })
	}
	m.Reached("pods are ready")
	c.Eventually(runBudget, "the node enforces policies", func() error {
		out, err := c.TryGbctl("get", "policies", "-n", node)
		if err == nil && !strings.Contains(out, "true") {
			err = fmt.Errorf("it says\n%s", out)
		}
		return err
	})
	m.Reached("the node enforces policies")
	t.Logf("the agent, idle:\n%s", c.agent(node))
	for _, try := range cases {
		t.Run(try.name, func(t *testing.T) {
			c := cluster{c.In(t), c.at}
			c.apply(try.policies(c))
			for pod, want := range try.reaches(c) {
				c.reaches(pod, want)
			}
			if _, err := c.ready("x/a"); err != nil {
				t.Errorf("the kubelet: %v", err)
			}
			if t.Failed() {
				t.Log(c.Try("-n", "kube-system", "logs", "daemonset/kube-network-policies", "--tail=60"))
			}
			m.Reached(try.name)
		})
	}
	t.Run("without the agent", func(t *testing.T) { cluster{c.In(t), c.at}.withoutAgent() })
	m.Reached("the agent was away, and came back")
	t.Logf("the agent, afterwards:\n%s", c.agent(node))
	if out := c.Gbctl("doctor", "-n", node); strings.Contains(out, "NetworkPolicies") {
		t.Error(out)
	}
}

// cases replace the policies of the one before.
var cases = []struct {
	name     string
	policies func(c cluster) []string
	reaches  func(c cluster) map[string][]string
}{
	{"should support a default-deny-ingress policy",
		func(cluster) []string { return []string{"{podSelector: {}, policyTypes: [Ingress]}"} },
		func(c cluster) map[string][]string {
			return map[string][]string{"x/a": c.all("z/a"), "x/b": c.all("z/a"), "z/a": {name}}
		}},
	{"should enforce policy based on PodSelector",
		func(cluster) []string {
			return []string{"{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}"}
		},
		func(c cluster) map[string][]string {
			return map[string][]string{"x/b": c.all("x/a", "z/a"), "z/a": c.all("x/b")}
		}},
	{"should enforce policy to allow traffic only from a different namespace, based on NamespaceSelector",
		func(cluster) []string {
			return []string{"{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: z}}}]}]}"}
		},
		func(c cluster) map[string][]string {
			return map[string][]string{"x/b": c.all("z/a"), "z/a": c.all("x/a", "x/b")}
		}},
	{"should enforce policy based on Ports",
		func(cluster) []string {
			return []string{"{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 8081}]}]}"}
		},
		func(c cluster) map[string][]string {
			return map[string][]string{"x/b": append(c.all("z/a"), c.port("x/a", "8081")), "z/a": append(c.all("x/b"), c.port("x/a", "8081"))}
		}},
	{"should support denying of egress traffic, with DNS",
		func(cluster) []string {
			return []string{"{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], egress: [{ports: [{port: 53, protocol: UDP}]}]}"}
		},
		func(c cluster) map[string][]string {
			return map[string][]string{"x/b": {name}, "z/a": c.all("x/a", "x/b")}
		}},
	{"should enforce except clause while egress access to server in CIDR block",
		func(c cluster) []string {
			return []string{fmt.Sprintf("{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [%s/32]}}]}]}", c.at["x/a"])}
		},
		func(c cluster) map[string][]string {
			return map[string][]string{"x/b": c.all("z/a"), "z/a": c.all("x/a", "x/b")}
		}},
	{"should ensure an IP overlapping both IPBlock.CIDR and IPBlock.Except is allowed",
		func(c cluster) []string {
			return []string{
				fmt.Sprintf("{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [%s/32]}}]}]}", c.at["x/a"]),
				fmt.Sprintf("{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: %s/32}}]}]}", c.at["x/a"]),
			}
		},
		func(c cluster) map[string][]string { return map[string][]string{"x/b": c.all("x/a", "z/a")} }},
	{"should stop enforcing policies after they are deleted",
		func(cluster) []string { return nil },
		func(c cluster) map[string][]string {
			return map[string][]string{"x/a": c.all("x/b", "z/a"), "x/b": c.all("x/a", "z/a"), "z/a": c.all("x/a", "x/b")}
		}},
}

// withoutAgent removes the agent for a time: what a policy is about gets no new connections, also those that it allows.
func (c cluster) withoutAgent() {
	c.T().Helper()
	c.apply([]string{"{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}"})
	c.reaches("z/a", c.all("x/b"))
	where := func(selector string) {
		c.T().Helper()
		patch := fmt.Sprintf(`[{"op":"add","path":"/spec/template/spec/nodeSelector","value":%s}]`, selector)
		c.Kubectl("-n", "kube-system", "patch", "daemonset", "kube-network-policies", "--type=json", "-p", patch)
	}
	where(`{"nowhere":"yes"}`)
	c.Eventually(runBudget, "the agent is away", func() error {
		out, err := c.Try("-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-network-policies", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
	c.reaches("z/a", c.all("x/b"))
	c.reaches("x/b", c.all("z/a"))
	where(`{}`)
	c.reaches("x/b", c.all("x/a", "z/a"))
	c.reaches("z/a", c.all("x/b"))
}

// apply makes these policies of namespace x all that there are.
func (c cluster) apply(specs []string) {
	c.T().Helper()
	c.Kubectl("-n", "x", "delete", "networkpolicies", "--all")
	for i, spec := range specs {
		c.Apply(fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d, namespace: x}\nspec: %s\n", i, spec))
	}
}

// reaches waits until a pod reaches these of all others, and no more.
func (c cluster) reaches(pod string, want []string) {
	c.T().Helper()
	space, own, _ := strings.Cut(pod, "/")
	command := []string{"-n", space, "exec", own, "--", "/peer", "reach", name}
	for other := range c.at {
		if other != pod {
			command = append(command, c.port(other, "8080"), c.port(other, "8081"))
		}
	}
	slices.Sort(want)
	c.Eventually(policyBudget, fmt.Sprintf("%s reaches %v", pod, want), func() error {
		out, err := c.Try(command...)
		got := strings.Fields(out)
		slices.Sort(got)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("it reaches %v", got)
		}
		return err
	})
}

func (c cluster) port(pod, port string) string { return net.JoinHostPort(c.at[pod], port) }

// all are both ports of pods, and the name that DNS knows.
func (c cluster) all(pods ...string) []string {
	targets := []string{name}
	for _, pod := range pods {
		targets = append(targets, c.port(pod, "8080"), c.port(pod, "8081"))
	}
	return targets
}

// ready returns the address of a pod that is.
func (c cluster) ready(pod string) (address string, err error) {
	space, own, _ := strings.Cut(pod, "/")
	out, err := c.Try("-n", space, "get", "pod", own, "-o", `jsonpath={.status.podIP} {.status.conditions[?(@.type=="Ready")].status}`)
	address, state, _ := strings.Cut(out, " ")
	if err == nil && state != "True" {
		err = fmt.Errorf("%s: ready is %q", pod, state)
	}
	return address, err
}

var row = regexp.MustCompile(`(?m)^.*netpol.*$`)

// agent is the agent's row in the list of processes, and its memory.
func (c cluster) agent(node string) string {
	found := row.FindString(c.Gbctl("processes", "-n", node))
	for _, field := range strings.Fields(found) {
		if text, err := c.TryGbctl("read", "-n", node, "/proc/"+field+"/smaps_rollup"); err == nil {
			return found + "\n" + text
		}
	}
	return found
}
