//go:build e2e && long

package endpoint

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// askEvery is how often the API is asked while the endpoint changes.
	askEvery = 200 * time.Millisecond
	// acceptBudget is for all API servers to accept what one of them signs.
	acceptBudget = 30 * time.Second
)

// The endpoint changes on all nodes under load, as docs/readdress.md says: no token gets 401, neither that of a pod nor
// one from before, and no pod restarts but the API servers.
func TestEndpointChangesUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "reendpoint", qemu.Container, e2etest.Nodes(3, 1), func(o *qemu.Options) {
		o.Patches = append(o.Patches, []byte("machine: {network: {extraHostEntries: [{ip: 10.5.0.3, aliases: [api.example.org]}]}}"))
	})
	c.Apply(strings.NewReplacer("IMAGE", config.DefaultAPIServerImage, "--port=8001", "--port=8001, --address=0.0.0.0, --accept-hosts=.*").Replace(pods))
	c.Kubectl("wait", "deployment/work", "--for=condition=Available", "--timeout=60s")
	c.Healthy()
	c.Apply("apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: work}\nroleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}\n" +
		"subjects: [{kind: ServiceAccount, name: default, namespace: default}]\n")
	pod := strings.TrimSpace(c.Kubectl("get", "pods", "-l", "app=work", "-o", "jsonpath={.items[0].metadata.name}"))
	token := strings.TrimSpace(c.Kubectl("create", "token", "default"))
	// A client certificate would be asked first.
	withToken := func(token string) []string {
		return []string{"--kubeconfig=/dev/null", fmt.Sprintf("--server=https://127.0.0.1:%d", c.KubernetesPort), "--insecure-skip-tls-verify", "--token", token,
			"get", "--raw", "/api/v1/namespaces/default/configmaps"}
	}
	before := restarts(c)
	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	load := map[string]*answers{
		"a pod, by its token":  {args: []string{"get", "--raw", "/api/v1/namespaces/default/pods/" + pod + ":8001/proxy/api/v1/namespaces/default/configmaps"}},
		"a token from before":  {args: withToken(token)},
		"a client certificate": {args: []string{"get", "--raw", "/api/v1/namespaces/default/configmaps"}},
	}
	for who, a := range load {
		c.Eventually(acceptBudget, who+" gets an answer", func() error {
			_, err := c.Try(a.args...)
			return err
		})
		asking.Go(func() { a.ask(ctx, c) })
	}
	const endpoint = "https://api.example.org:6443"
	if out, err := c.TryGbctl("-n", c.Nodes[0].Name, "set-endpoint", "https://10.5.0.250:6443"); err == nil || !strings.Contains(err.Error(), "leads to no API server of this cluster") {
		t.Errorf("an endpoint where nobody is: %s, %v", out, err)
	}
	if out := c.Gbctl("-n", c.Nodes[0].Name, "set-endpoint", endpoint, "--dry-run"); !strings.Contains(out, "nodes that get the endpoint "+endpoint+", one after another: 4") {
		t.Errorf("the plan: %s", out)
	}
	c.Gbctl("-n", c.Nodes[0].Name, "set-endpoint", endpoint)
	m.Reached("the endpoint is another one on all nodes")
	c.Healthy()
	fresh := strings.TrimSpace(c.Kubectl("create", "token", "default"))
	for range 4 * len(c.ControlPlanes()) { // the load balancer takes one after another
		if out, err := c.Try(withToken(fresh)...); err != nil {
			t.Errorf("an API server doesn't accept a new token: %v: %s", err, out)
		}
	}
	for _, n := range c.Nodes {
		if got := c.Gbctl("-n", n.Name, "config", "show"); !strings.Contains(got, endpoint) {
			t.Errorf("node %s doesn't have the endpoint", n.Name)
		}
	}
	stop()
	asking.Wait()
	for who, a := range load {
		t.Logf("%s: %d answers, %d requests without one, at most %s without an answer", who, a.good, a.failed, a.longest.Round(time.Millisecond))
		if a.good == 0 || len(a.refused) > 0 {
			t.Errorf("%s: %d answers; refused: %q", who, a.good, a.refused)
		}
	}
	for name, count := range restarts(c) {
		if was, there := before[name]; there && was != count || !there {
			t.Errorf("pod %s: restarts %s, and before %q", name, count, was)
		}
	}
}

// answers are those of one client.
type answers struct {
	args         []string
	good, failed int
	longest      time.Duration // without an answer
	refused      []string
}

// ask asks until ctx ends.
func (a *answers) ask(ctx context.Context, c *e2etest.Cluster) {
	for last := time.Now(); ctx.Err() == nil; time.Sleep(askEvery) {
		_, err := c.Try(a.args...)
		switch {
		case err == nil:
			a.longest = max(a.longest, time.Since(last))
			last = time.Now()
			a.good++
		case strings.Contains(err.Error(), "Unauthorized") || strings.Contains(err.Error(), "Forbidden"):
			a.refused = append(a.refused, err.Error())
		default: // the API server that was asked restarts
			a.failed++
		}
	}
}

// restarts are those of the containers of all pods but the API servers.
func restarts(c *e2etest.Cluster) map[string]string {
	c.T().Helper()
	all := map[string]string{}
	out := c.Kubectl("get", "pods", "-A", "-o", `jsonpath={range .items[*]}{.metadata.name}{" "}{.metadata.uid}{" "}{.status.containerStatuses[*].restartCount}{"\n"}{end}`)
	for line := range strings.Lines(out) {
		name, count, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != "" && !strings.HasPrefix(name, "kube-apiserver-") {
			all[name] = count
		}
	}
	return all
}
