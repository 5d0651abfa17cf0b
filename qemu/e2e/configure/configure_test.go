//go:build e2e

// Package configure tests changes of a node's configuration with gbctl: it is
// changed while the node runs, tried, undone, staged and rolled back, and the
// node's power is cut during a change.
package configure

import (
	"archive/zip"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	apiBudget = 10 * time.Second // from power-on to an answer
	upBudget  = 30 * time.Second // until all services are up
	// tried is the time for which a change is tried: the minimum.
	tried = 10 * time.Second
)

// trying is tried on this machine: enough time for a node to boot, and for the checks.
func trying() time.Duration { return eventually.Scale(tried).Round(time.Second) }

// answers waits for the machine API.
func answers(c *e2etest.Cluster) {
	c.Eventually(apiBudget, "the machine API answers", func() error {
		_, err := c.TryGbctl("version")
		return err
	})
}

// up waits for all services in gbctl's output.
// up waits for the services; static pods, which health waits for too, take longer.
func up(c *e2etest.Cluster) {
	c.Eventually(upBudget, "all services are up", func() error {
		out, err := c.TryGbctl("health")
		if m := servicesUp.FindStringSubmatch(out); m != nil && m[1] == m[2] {
			return nil
		}
		return fmt.Errorf("%w:\n%s", err, out)
	})
}

// servicesUp is a column of gbctl health.
var servicesUp = regexp.MustCompile(`\s(\d+)/(\d+)\s`)

func TestConfigureInContainer(t *testing.T) {
	c, m := e2etest.Start(t, "configure", qemu.Container)
	answers(c)
	m.Reached("the machine API answers")
	up(c)
	m.Reached("all services are up")

	t.Run("live changes", func(t *testing.T) { live(t, c.In(t)) })
	t.Run("a broken network is undone", func(t *testing.T) { tryNetwork(t, c.In(t)) })
	t.Run("arguments that exclude defaults, and another endpoint", func(t *testing.T) { arguments(t, c.In(t)) })
	t.Run("a bad image is found out", func(t *testing.T) { badImage(t, c.In(t)) })
	t.Run("a bad image of a service stops nothing", func(t *testing.T) { badService(t, c.In(t)) })
	t.Run("S-226 static pods are put back", func(t *testing.T) { putBack(t, c.In(t)) })
	t.Run("container runtime", func(t *testing.T) { containerRuntime(t, c.In(t)) })
	t.Run("a support bundle holds no secret", func(t *testing.T) { support(t, c.In(t)) })
	t.Run("a try with a reboot is undone", func(t *testing.T) { tryReboot(t, c.In(t)) })
	t.Run("staged, then rebooted", func(t *testing.T) { staged(t, c.In(t)) })
	t.Run("power is cut while applying", func(t *testing.T) { cut(t, c.In(t)) })
}

// Without a restart of anything: files, sysctls, name servers, time servers, the
// host name, addresses, and arguments of the control plane (S-033, S-039).
func live(t *testing.T, c *e2etest.Cluster) {
	node := c.Nodes[0]
	patch := `
machine:
  sysctls: {net.core.somaxconn: "4242"}
  kubelet: {extraArgs: {v: "3"}}
  network:
    nameservers: [10.5.0.1, 10.5.0.53]
    interfaces: [{interface: eth0, routes: [{network: 192.0.2.0/24, gateway: 10.5.0.1}]}]
  files: [{path: /etc/e2e, content: "test\n", permissions: 0640}]
cluster:
  scheduler: {extraArgs: {v: "3"}}
`
	out := c.Gbctl("patch", "mc", "--immediate", "-p", patch)
	if !strings.Contains(out, "patched mc at the node "+node.Address.String()) { // S-030
		t.Errorf("patch said %q", out)
	}
	for path, want := range map[string]string{
		"/proc/sys/net/core/somaxconn": "4242",
		"/etc/e2e":                     "test",
		"/etc/resolv.conf":             "10.5.0.53",
		"/etc/kubernetes/manifests/garboard-kube-scheduler.yaml": "--v=3",
	} {
		c.Eventually(apiBudget, path+" has "+want, func() error {
			have, err := c.TryGbctl("read", path)
			if err == nil && !strings.Contains(have, want) {
				err = fmt.Errorf("it has %q", have)
			}
			return err
		})
	}
	c.Eventually(upBudget, "the kubelet runs with its new argument", func() error {
		all, err := c.TryGbctl("processes", "-o", "json")
		if err == nil && !kubelet.MatchString(all) {
			err = fmt.Errorf("it doesn't")
		}
		return err
	})
	if mode := c.Gbctl("ls", "-l", "/etc/e2e"); !strings.Contains(mode, "-rw-r-----") {
		t.Errorf("permissions: %s", mode)
	}
	c.Gbctl("config", "rollback", "--immediate")
	c.Eventually(apiBudget, "the file of the configuration is gone again", func() error {
		if _, err := c.TryGbctl("read", "/etc/e2e"); err == nil {
			return fmt.Errorf("it is still there")
		}
		return nil
	})
	if _, err := c.TryGbctl("patch", "mc", "--immediate", "-p", "machine: {type: controlplane}"); err == nil || !strings.Contains(err.Error(), "machine.type") {
		t.Errorf("immediate took what needs a reboot: %v", err)
	}
}

// kubelet matches its command line with the argument that the test has set.
var kubelet = regexp.MustCompile(`"kubelet [^"]*--v=3`)

// A change that needs a reboot is tried by the next boot; without a
// confirmation it is undone, with another reboot.
func tryReboot(t *testing.T, c *e2etest.Cluster) {
	has := func(kind string) func() error {
		return func() error {
			out, err := c.TryGbctl("get", "machinetypes")
			if err == nil && !strings.Contains(out, " "+kind+"\n") {
				err = fmt.Errorf("it is %s", out)
			}
			return err
		}
	}
	c.Gbctl("patch", "mc", "--try", "--try-timeout", trying().String(), "-p", "machine: {type: controlplane}")
	c.Eventually(upBudget, "the node has rebooted into what is tried", has("controlplane"))
	c.Eventually(trying()+upBudget, "the node has rebooted into what was before", has("init"))
	up(c)
}

// The most important duty: a node that can't be reached any more recovers.
func tryNetwork(t *testing.T, c *e2etest.Cluster) {
	node := c.Nodes[0]
	before := c.Gbctl("get", "mc", "-o", "yaml")
	patch := `[{"op": "replace", "path": "/machine/network/interfaces/0/cidr", "value": "10.5.0.77/24"}]`
	if out := c.Gbctl("patch", "mc", "--try", "--try-timeout", trying().String(), "-p", patch); !strings.Contains(out, "confirm") {
		t.Errorf("trying said %q", out)
	}
	c.Eventually(apiBudget, "the node can't be reached at "+node.Address.String(), func() error {
		if _, err := c.TryGbctl("version", "--timeout", "1s"); err == nil {
			return fmt.Errorf("it can")
		}
		return nil
	})
	c.Eventually(trying()+apiBudget, "the node is back", func() error {
		_, err := c.TryGbctl("version")
		return err
	})
	if after := c.Gbctl("get", "mc", "-o", "yaml"); !strings.Contains(after, "10.5.0.2/24") || strings.Contains(after, "10.5.0.77") {
		t.Errorf("the configuration before:\n%s\nafter:\n%s", before, after)
	}
	if _, err := c.TryGbctl("config", "confirm"); err == nil {
		t.Error("it can be confirmed afterwards")
	}
}

// The kubelet and etcd go on while their new images don't exist. Health names the image, and a rollback ends that.
func badService(t *testing.T, c *e2etest.Cluster) {
	for field, image := range map[string]string{
		"machine: {kubelet: {image: %s}}": "ghcr.io/garboard-os/kubelet:" + strings.TrimPrefix(config.KubernetesVersion, "v"),
		"cluster: {etcd: {image: %s}}":    "registry.k8s.io/etcd:v" + config.EtcdVersion,
	} {
		id := regexp.MustCompile(`kubelet|etcd`).FindString(field)
		before, err := c.Processes(id)
		if err != nil || len(before) != 1 {
			t.Fatalf("processes of %s: %v, %v", id, before, err)
		}
		c.Gbctl("patch", "mc", "--immediate", "-p", fmt.Sprintf(field, image))
		c.Eventually(upBudget, "health and doctor name "+image, func() error {
			health, err := c.TryGbctl("health")
			doctor, _ := c.TryGbctl("doctor")
			if err == nil || !strings.Contains(health, image) || !strings.Contains(doctor, image) {
				return fmt.Errorf("they say %w:\n%s\n%s", err, health, doctor)
			}
			return nil
		})
		if after, err := c.Processes(id); err != nil || !slices.Equal(before, after) {
			t.Errorf("processes of %s were %v, and are %v: %v", id, before, after, err)
		}
		if err := c.NodesReady(c.Nodes[0]); err != nil {
			t.Error(err)
		}
		c.Gbctl("config", "rollback")
		c.Eventually(2*upBudget, "the node is healthy again", func() error { _, err := c.TryGbctl("health"); return err })
	}
}

// A patch sets the API server's image to one that doesn't exist; doctor reports
// why the node waits, the former API server goes on, and a rollback ends that.
func badImage(t *testing.T, c *e2etest.Cluster) {
	const image = "registry.k8s.io/kube-apiserver:v1.37.99"
	c.Gbctl("patch", "mc", "--immediate", "-p", `[{"op": "replace", "path": "/cluster/apiServer/image", "value": "`+image+`"}]`)
	c.Eventually(upBudget, "doctor names the image", func() error {
		out, _ := c.TryGbctl("doctor")
		if !strings.Contains(out, image) {
			return fmt.Errorf("it says:\n%s", out)
		}
		return nil
	})
	if out, err := c.Try("get", "--raw=/readyz"); err != nil {
		t.Errorf("the former API server: %v: %s", err, out)
	}
	c.Gbctl("config", "rollback")
	c.Eventually(2*upBudget, "the node is healthy again", func() error { _, err := c.TryGbctl("health"); return err })
}

// A support bundle for another person must not contain secrets of the cluster.
func support(t *testing.T, c *e2etest.Cluster) {
	file := filepath.Join(t.TempDir(), "support.zip")
	c.Gbctl("support", "-O", file)
	z, err := zip.OpenReader(file)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	secrets := secretsOf(t, c)
	var names []string
	for _, f := range z.File {
		names = append(names, f.Name)
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			t.Fatal(err)
		}
		for what, secret := range secrets {
			if strings.Contains(string(data), secret) {
				t.Errorf("%s holds %s", f.Name, what)
			}
		}
	}
	if len(names) < 10 {
		t.Errorf("the bundle has only %q", names)
	}
}

// secretsOf are the texts that must not be in a support bundle.
func secretsOf(t *testing.T, c *e2etest.Cluster) map[string]string {
	t.Helper()
	data, err := os.ReadFile(c.Configuration(c.Node()))
	if err != nil {
		t.Fatal(err)
	}
	cfg, _, err := config.Load("the node's", data)
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{
		"the machine token": string(cfg.Machine.Token), "the join token": string(cfg.Cluster.Token), "the cluster's secret": string(cfg.Cluster.Secret),
	}
	for name, key := range map[string]config.KeyPEM{
		"the machine CA's key": cfg.Machine.CA.Key, "the cluster CA's key": cfg.Cluster.CA.Key, "etcd's CA key": cfg.Cluster.Etcd.CA.Key,
		"the service account key": cfg.Cluster.ServiceAccount.Key, "the aggregator CA's key": cfg.Cluster.AggregatorCA.Key,
	} {
		lines := strings.Split(strings.TrimSpace(string(key)), "\n")
		secrets[name] = lines[1]
	}
	return secrets
}

// S-034: a staged configuration takes effect with the reboot, and not before.
func staged(t *testing.T, c *e2etest.Cluster) {
	const patch = `machine: {files: [{path: /etc/staged, content: "yes\n"}]}`
	c.Gbctl("patch", "mc", "--on-reboot", "-p", patch)
	if out := c.Gbctl("get", "mc", "-o", "yaml"); strings.Contains(out, "/etc/staged") { // S-035
		t.Errorf("the staged configuration is current:\n%s", out)
	}
	said := len(c.Text())
	c.Gbctl("reboot")
	c.Says(apiBudget, said, "reboot")
	c.Eventually(2*upBudget, "the staged file is there", func() error {
		_, err := c.TryGbctl("read", "/etc/staged")
		return err
	})
	up(c)
}

// cuts are enough to hit several points of an apply in one run of the test; the
// test with a thousand is in services/system/configuration.
const cuts = 6

// The power is cut while configurations are applied: after that the node has the
// last one that was acknowledged, or the complete one that was being applied.
func cut(t *testing.T, c *e2etest.Cluster) {
	const file = "/etc/number"
	content := func(n int) string { return fmt.Sprintf("%d\n", n) }
	apply := func(text string) error {
		_, err := c.TryGbctl("patch", "mc", "--immediate", "-p", fmt.Sprintf("machine: {files: [{path: %s, content: %q}]}", file, text))
		return err
	}
	held, number := content(0), 1
	if err := apply(held); err != nil {
		t.Fatal(err)
	}
	for range cuts {
		// acknowledged is the content of the last successful apply; tried is that of
		// the apply that the cut may have hit.
		type outcome struct {
			acknowledged, tried string
			err                 error
		}
		stop := make(chan struct{})
		finished := make(chan outcome, 1)
		go func() {
			o := outcome{acknowledged: held, tried: held}
			defer func() { finished <- o }()
			for ; ; number++ {
				select {
				case <-stop:
					return
				default:
				}
				o.tried = content(number)
				if o.err = apply(o.tried); o.err != nil {
					number++
					return
				}
				o.acknowledged = o.tried
			}
		}()
		// At any time during some applies.
		select {
		case <-time.After(time.Duration(rand.IntN(1500)) * time.Millisecond):
		case o := <-finished:
			t.Fatalf("applying %q failed before the power cut: %v", o.tried, o.err)
		case <-t.Context().Done():
		}
		if err := c.Cut(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
		close(stop)
		o := <-finished
		if err := c.On(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
		answers(c)
		var got string
		c.Eventually(apiBudget, "the file is laid", func() (err error) {
			got, err = c.TryGbctl("read", file)
			return err
		})
		if got != o.acknowledged && got != o.tried {
			t.Fatalf("after the power cut the number is %q, want %q, which was acknowledged, or %q, which was being applied", got, o.acknowledged, o.tried)
		}
		t.Logf("power cut at %q after %q: the node came back with %q", o.tried, o.acknowledged, got)
		held = got
	}
}
