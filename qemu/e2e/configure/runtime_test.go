//go:build e2e

package configure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/osthread"
)

const (
	// putBackBudget is the time until changed files of static pods are restored.
	putBackBudget = 20 * time.Second

	// otherRegistry is a name that no name server knows, so nodes can use it through the proxy
	// only.
	otherRegistry  = "registry.e2e.test"
	metricsAddress = "0.0.0.0:11234" // S-144
)

// runtimePatch gives containerd a drop-in, a proxy, and a registry that only the proxy knows.
const runtimePatch = `
machine:
  files: [{path: /var/cri/conf.d/metrics.toml, op: create, permissions: 0644, content: "[metrics]\n  address = \"` + metricsAddress + `\"\n"}]
  env: {http_proxy: "PROXY", no_proxy: "10.5.0.0/16"}
  registries: {mirrors: {` + otherRegistry + `: {endpoints: ["http://` + otherRegistry + `"]}}}
`

// A pod with an image that no node has under this name.
const otherPause = `
apiVersion: v1
kind: Pod
metadata: {name: other, namespace: kube-system} # it allows the host's network
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  containers: [{name: other, image: IMAGE}]
`

// putBack: the configuration counts, not what somebody writes into the files that come from it.
func putBack(t *testing.T, c *e2etest.Cluster) {
	pids, err := c.Processes("containerd")
	if err != nil || len(pids) != 1 {
		t.Fatalf("processes of containerd: %v, %v", pids, err)
	}
	file := func(pod string) string {
		return fmt.Sprintf("/proc/%d/root/etc/kubernetes/manifests/garboard-%s.yaml", pids[0], pod)
	}
	was := map[string][]byte{}
	for _, pod := range []string{"kube-scheduler", "kube-controller-manager"} {
		if was[pod], err = os.ReadFile(file(pod)); err != nil {
			t.Fatal(err)
		}
	}
	edited := bytes.Replace(was["kube-scheduler"], []byte("--leader-elect=true"), []byte("--leader-elect=false"), 1)
	if bytes.Equal(edited, was["kube-scheduler"]) {
		t.Fatalf("no argument to edit in:\n%s", edited)
	}
	if err := errors.Join(os.WriteFile(file("kube-scheduler"), edited, 0o600), os.Remove(file("kube-controller-manager"))); err != nil {
		t.Fatal(err)
	}
	for pod, want := range was {
		c.Eventually(putBackBudget, "the file of "+pod+" is as it was", func() error {
			have, err := os.ReadFile(file(pod))
			if err == nil && !bytes.Equal(counts.ReplaceAll(have, nil), counts.ReplaceAll(want, nil)) {
				err = fmt.Errorf("it is:\n%s", have)
			}
			return err
		})
	}
	up(c)
}

// counts is the line with how often a pod was written, until the kubelet began it.
var counts = regexp.MustCompile(`(?m)^ *garboard\.dev/starts: .*\n`)

// other returns the name that a default image has in the registry behind the proxy.
func other(image string) string {
	_, rest, _ := strings.Cut(image, "/")
	return otherRegistry + "/" + rest
}

// containerRuntime changes what containerd is started with, and the kubelet's image.
func containerRuntime(t *testing.T, c *e2etest.Cluster) {
	network := c.Network()
	p := newProxy(t, network)
	c.Gbctl("patch", "mc", "--immediate", "-p", strings.Replace(runtimePatch, "PROXY", p.url, 1))
	t.Run("S-144 metrics of containerd", func(t *testing.T) { metrics(c.In(t), network) })
	t.Run("S-145 environment of containerd", func(t *testing.T) { environment(c.In(t), "http_proxy="+p.url) })
	t.Run("S-067 S-242 S-322 kubelet of another image", func(t *testing.T) { otherKubelet(t, c.In(t), p) })
	t.Run("S-145 pod of another image", func(t *testing.T) { otherPod(t, c.In(t), p) })
	c.Gbctl("apply-config", "--immediate", "-f", c.Configuration(c.Node()))
	up(c)
}

// metrics are those of containers: the kubelet's is the one that every node has.
func metrics(c *e2etest.Cluster, network *osthread.Thread) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return network.Dial(ctx, address)
	}}
	client := &http.Client{Transport: transport, Timeout: apiBudget}
	_, port, _ := net.SplitHostPort(metricsAddress)
	url := "http://" + net.JoinHostPort(c.Nodes[0].Address.String(), port) + "/v1/metrics"
	c.Eventually(upBudget, "containerd serves its metrics", func() error {
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err == nil && !kubeletMetric.Match(text) {
			err = fmt.Errorf("%s: %s: %.500s", url, resp.Status, text)
		}
		return err
	})
}

var kubeletMetric = regexp.MustCompile(`(?m)^container_\w+\{(.*,)?container_id="kubelet",.*\} [0-9.e+]+$`)

// environment waits until containerd has a variable.
func environment(c *e2etest.Cluster, variable string) {
	c.Eventually(apiBudget, "containerd has "+variable, func() error {
		pids, err := c.Processes("containerd")
		if err != nil || len(pids) != 1 {
			return fmt.Errorf("processes of containerd: %v, %w", pids, err)
		}
		all, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pids[0]))
		if err == nil && !bytes.Contains(append([]byte{0}, all...), []byte("\x00"+variable+"\x00")) {
			err = fmt.Errorf("it has %q", all)
		}
		return err
	})
}

// otherKubelet: Garboard pulls the image itself, through the proxy. The former kubelet runs
// as long as the registry does not answer.
func otherKubelet(t *testing.T, c *e2etest.Cluster, p *proxy) {
	image := other(config.DefaultKubeletImage)
	c.Gbctl("patch", "mc", "--immediate", "-p", "machine: {kubelet: {image: "+image+"}}")
	pulls := regexp.MustCompile(`(?s)STATE +Running\n.*\[Running\]: goes on with [^\n]* image ` + regexp.QuoteMeta(image) + ` is being pulled`)
	c.Eventually(upBudget, "the kubelet goes on while its image is pulled", func() error {
		out, err := c.TryGbctl("service", "kubelet")
		if err == nil && (!pulls.MatchString(out) || !p.asked(image)) {
			err = fmt.Errorf("it is:\n%s", out)
		}
		return err
	})
	p.release()
	c.Eventually(upBudget, "the kubelet runs with its other image", func() error {
		out, err := c.TryGbctl("containers")
		if err == nil && !e2etest.Row(out, "kubelet", image, "CONTAINER_RUNNING") {
			err = fmt.Errorf("containers are:\n%s", out)
		}
		if err != nil {
			return err
		}
		return startedTask(c)
	})
}

var started = regexp.MustCompile(`\[Running\]: Started task kubelet \(PID ([0-9]+)\) for container kubelet `)

// startedTask compares the PID in the newest event of the kubelet's start with that of its
// process (S-237).
func startedTask(c *e2etest.Cluster) error {
	out, err := c.TryGbctl("service", "kubelet")
	if err != nil {
		return err
	}
	event := started.FindStringSubmatch(out)
	pids, err := c.Processes("kubelet")
	if err != nil || len(pids) != 1 || event == nil {
		return fmt.Errorf("processes %v of the kubelet, %w, its events:\n%s", pids, err, out)
	}
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pids[0]) + "/status")
	if err != nil {
		return err
	}
	// The last one is the PID in the node (proc_pid_status(5)).
	if !regexp.MustCompile(`(?m)^NSpid:.*\t` + event[1] + `$`).Match(status) {
		return fmt.Errorf("%s isn't in:\n%s", event[1], status)
	}
	return nil
}

// otherPod: what pods need is pulled by containerd, through the proxy of its environment.
func otherPod(t *testing.T, c *e2etest.Cluster, p *proxy) {
	image := other(config.DefaultPauseImage)
	c.Apply(strings.Replace(otherPause, "IMAGE", image, 1))
	c.Eventually(upBudget, "the pod runs", func() error {
		out, err := c.Try("-n", "kube-system", "get", "pod", "other", "-o", "jsonpath={.status.phase} {.status.containerStatuses[0]}")
		if err == nil && !strings.HasPrefix(out, "Running ") {
			err = fmt.Errorf("it is %s", out)
		}
		return err
	})
	if !p.asked(image) {
		t.Errorf("the proxy wasn't asked for %s", image)
	}
	c.Kubectl("-n", "kube-system", "delete", "pod", "other", "--wait=false")
}

// A proxy in the nodes' network, which answers for otherRegistry itself. It holds all
// answers until release.
type proxy struct {
	url     string
	release func()

	mu    sync.Mutex // guards paths
	paths map[string]bool
}

func newProxy(t *testing.T, network *osthread.Thread) *proxy {
	t.Helper()
	images := registry.New(e2etest.Built(t, qemu.Container).Layout)
	released := make(chan struct{})
	p := &proxy{release: sync.OnceFunc(func() { close(released) }), paths: map[string]bool{}}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Host != otherRegistry { // of a request to a proxy the URL is absolute
			http.Error(w, "not a request for "+otherRegistry, http.StatusBadGateway)
			return
		}
		p.mu.Lock()
		p.paths[r.URL.Path] = true
		p.mu.Unlock()
		select {
		case <-released:
			images.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	listener, err := network.Listen("10.5.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server.Listener.Close()
	server.Listener = listener
	server.Start()
	t.Cleanup(server.Close)
	t.Cleanup(p.release)
	p.url = server.URL
	return p
}

// asked reports whether the manifest of an image was asked for.
func (p *proxy) asked(image string) bool {
	repository, tag, _ := strings.Cut(strings.TrimPrefix(image, otherRegistry+"/"), ":")
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.paths["/v2/"+repository+"/manifests/"+tag]
}
