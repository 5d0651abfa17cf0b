//go:build e2e

// Package create tests a cluster that a user makes, uses and removes, with
// gbctl only. The user's files also have the contexts of other clusters.
package create

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// createBudget is for a control plane and a worker to be ready.
	createBudget = 2 * time.Minute
	// destroyPromise is how long the removal of a cluster may take.
	destroyPromise = 10 * time.Second
	// askBudget is for requests to a running cluster.
	askBudget = 30 * time.Second
)

// othersKubeconfig is the user's existing kubeconfig, as kubectl writes it.
const othersKubeconfig = `# mine
apiVersion: v1
clusters:
- cluster:
    server: https://work.example.org:6443
  name: work
contexts:
- context:
    cluster: work
    namespace: mine
    user: me
  name: work
current-context: work
kind: Config
preferences: {}
users:
- name: me
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: sign-in # asks for the key
`

// A user has files and clusters of their own.
type user struct {
	t                                *testing.T
	pace                             eventually.Pace
	home, kubeconfig, garboardconfig string
	kubectl                          string
}

func newUser(t *testing.T, cluster string) *user {
	made := e2etest.Built(t, qemu.Container)
	e2etest.Home(t)
	dir := t.TempDir()
	u := &user{
		t: t, pace: e2etest.Pace(t), home: os.Getenv("GARBOARD_HOME"), kubectl: made.Kubectl(),
		kubeconfig: filepath.Join(dir, "kubeconfig"), garboardconfig: filepath.Join(dir, "garboardconfig"),
	}
	t.Setenv("KUBECONFIG", u.kubeconfig)
	t.Setenv(client.EnvConfig, u.garboardconfig)
	if err := errors.Join(os.WriteFile(u.kubeconfig, []byte(othersKubeconfig), 0o600), others("work").Save(u.garboardconfig)); err != nil {
		t.Fatal(err)
	}
	e2etest.Sweep(t, cluster)
	u.gbctl(askBudget, "help", "exit-codes") // so that it is built before any measurement
	return u
}

// others is the user's existing client configuration.
func others(current string) *client.Config {
	return &client.Config{Context: current, Contexts: map[string]*client.Context{
		"work": {Endpoints: []string{"192.0.2.1"}, CA: "Y2E=", Crt: "Y3J0", Key: "a2V5"},
	}}
}

// gbctl is e2etest.UserGbctl that must succeed.
func (u *user) gbctl(budget time.Duration, args ...string) string {
	u.t.Helper()
	out, err := e2etest.UserGbctl(u.t, budget, args...)
	if err != nil {
		u.t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// ask runs the kubectl that was built, with the user's own kubeconfig.
func (u *user) ask(args ...string) string {
	u.t.Helper()
	cmd := exec.CommandContext(u.t.Context(), u.kubectl, append(args, "--request-timeout="+eventually.Scale(askBudget).String())...)
	out, err := cmd.Output()
	if err != nil {
		u.t.Fatalf("kubectl %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// current checks the current contexts of both programs.
func (u *user) current(gbctl, kubectl string) {
	u.t.Helper()
	c, err := client.Load(u.garboardconfig)
	if err != nil {
		u.t.Fatal(err)
	}
	if c.Context != gbctl || c.Contexts["work"] == nil {
		u.t.Errorf("gbctl's context is %q of %d, not %q", c.Context, len(c.Contexts), gbctl)
	}
	if got := strings.TrimSpace(u.ask("config", "view", "-o", "jsonpath={.current-context}")); got != kubectl {
		u.t.Errorf("kubectl's context is %q, not %q", got, kubectl)
	}
}

// destroy removes a cluster in time. It checks that all of it is gone, and that the
// user's files are as before, except for the current context if that was the cluster.
func (u *user) destroy(cluster, current string) {
	u.t.Helper()
	start := time.Now()
	if out := u.gbctl(createBudget, "cluster", "destroy", "--name", cluster); out != "cluster "+cluster+" is gone\n" {
		u.t.Errorf("destroy says %q", out)
	}
	end := time.Now()
	u.t.Logf("destroyed in %.1fs", end.Sub(start).Seconds())
	if err := u.pace.Kept(start, end, destroyPromise); err != nil {
		u.t.Errorf("destroy: %v", err)
	}
	left := snapshot.Take(u.t, cluster)
	for _, aspect := range snapshot.Living {
		if len(left[aspect]) > 0 {
			u.t.Errorf("destroy left %s: %q", aspect, left[aspect])
		}
	}
	if _, err := os.Stat(filepath.Join(u.home, "clusters", cluster)); !errors.Is(err, fs.ErrNotExist) {
		u.t.Errorf("destroy left its directory: %v", err)
	}
	u.untouched(current)
	if out := u.gbctl(askBudget, "cluster", "destroy", "--name", cluster); out != "there is no cluster "+cluster+"\n" {
		u.t.Errorf("destroyed again: %q", out)
	}
}

// untouched checks that the user's files are, byte for byte, what they were before.
func (u *user) untouched(current string) {
	u.t.Helper()
	garboardconfig, err := others(current).Encode()
	if err != nil {
		u.t.Fatal(err)
	}
	kubeconfig := othersKubeconfig
	if current == "" {
		kubeconfig = strings.Replace(kubeconfig, "current-context: work", `current-context: ""`, 1)
	}
	for path, want := range map[string]string{u.garboardconfig: string(garboardconfig), u.kubeconfig: kubeconfig} {
		got, err := os.ReadFile(path)
		if err != nil {
			u.t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			u.t.Errorf("%s isn't what it was:\n%s", path, diff)
		}
	}
}

// inOrder checks that lines with these beginnings follow each other, with any lines in between.
func inOrder(t *testing.T, text string, beginnings ...string) {
	t.Helper()
	lines := strings.Split(text, "\n")
	for _, want := range beginnings {
		at := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) })
		if at < 0 {
			t.Fatalf("no line %q where it belongs in:\n%s", want, text)
		}
		lines = lines[at+1:]
	}
}

// A mirror has the images that were built, and records the requests.
type mirror struct {
	*httptest.Server
	mu    sync.Mutex // guards asked
	asked map[string]bool
}

func newMirror(t *testing.T) *mirror {
	images := registry.New(e2etest.Built(t, qemu.Container).Layout)
	m := &mirror{asked: map[string]bool{}}
	m.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		m.asked[r.URL.Path] = true
		m.mu.Unlock()
		images.ServeHTTP(w, r)
	}))
	t.Cleanup(m.Close)
	return m
}

// was reports whether an image was requested.
func (m *mirror) was(image string) bool {
	_, rest, _ := strings.Cut(image, "/")
	repository, tag, _ := strings.Cut(rest, ":")
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked["/v2/"+repository+"/manifests/"+tag]
}

// S-330, S-331, S-332
func TestS331CreateShowDestroy(t *testing.T) {
	const name = "byhand"
	u := newUser(t, name)
	images := newMirror(t)
	at, err := url.Parse(images.URL)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	out := u.gbctl(createBudget, "cluster", "create", "--provisioner", "container", "--name", name, "--controlplanes", "1", "--workers", "1",
		"--cidr", "10.9.0.0/24", "--registry-mirror", "*=http://10.9.0.1:"+at.Port(),
		"--config-patch", "{machine: {kubelet: {nodeLabels: {e2e: create}}}}", "--config-patch-worker", "{machine: {kubelet: {nodeLabels: {only: worker}}}}")
	t.Attr(e2etest.Booted, qemu.Container)
	t.Logf("created in %.1fs:\n%s", time.Since(start).Seconds(), out)

	// What exit code 0 promises is checked once, without a wait.
	nodes := u.ask("get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status} `+
		`{.status.addresses[?(@.type=="InternalIP")].address} {.metadata.labels.e2e}{.metadata.labels.only}{"\n"}{end}`)
	if want := "byhand-controlplane-1 True 10.9.0.2 create\nbyhand-worker-1 True 10.9.0.3 createworker\n"; nodes != want {
		t.Errorf("nodes are\n%s, not\n%s", nodes, want)
	}
	inOrder(t, out, "nodes run as containers: asked for", "validating CIDR and reserving IPs", "generating PKI and tokens",
		fmt.Sprintf("creating state directory in %q", filepath.Join(u.home, "clusters", name)), "creating network "+name,
		"creating load balancer", "creating control plane nodes", "creating worker nodes", "waiting for API",
		"cluster byhand serves, ", `gbctl's context is "byhand" now`, `kubectl's context is "admin@byhand" now`)
	for _, milestone := range []string{qemu.MilestoneAPI, "all nodes Ready", qemu.MilestoneDNS} {
		if !strings.Contains(out, "s  "+milestone+"\n") {
			t.Errorf("it doesn't say %q", milestone)
		}
	}
	if strings.Contains(out, "dhcpd") {
		t.Error("containers need no DHCP server")
	}
	u.current(name, "admin@"+name)
	for _, image := range []string{config.DefaultEtcdImage, config.DefaultKubeletImage, config.DefaultAPIServerImage} {
		if !images.was(image) {
			t.Errorf("the mirror wasn't asked for %s", image)
		}
	}
	patched(t, u)
	t.Run("show", func(t *testing.T) { shown(t, u, "running") })
	t.Run("freeze and thaw", func(t *testing.T) { frozen(t, u) })
	t.Run("create again", func(t *testing.T) { again(t, u) })
	u.destroy(name, "")
}

// patched checks the patches in the nodes' configurations, each on its nodes.
func patched(t *testing.T, u *user) {
	t.Helper()
	for address, labels := range map[string]map[string]string{
		"10.9.0.2": {"e2e": "create"},
		"10.9.0.3": {"e2e": "create", "only": "worker"},
	} {
		text := u.gbctl(askBudget, "-n", address, "read", "/system/state/config.yaml")
		c, _, err := config.Load(address, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(labels, c.Machine.Kubelet.NodeLabels); diff != "" {
			t.Errorf("labels in the configuration of %s:\n%s", address, diff)
		}
		if got := c.Machine.Network.Interfaces[0].CIDR; got != netip.MustParsePrefix(address+"/24") {
			t.Errorf("%s has the address %s", address, got)
		}
	}
}

// shown checks a table with both nodes, and the state of the worker.
func shown(t *testing.T, u *user, worker string) {
	t.Helper()
	out := u.gbctl(askBudget, "cluster", "show", "--name", "byhand")
	var rows []string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 4 {
			rows = append(rows, strings.Join(f[:5], " "))
		}
	}
	want := []string{
		"CLUSTER NODE TYPE ADDRESS STATE",
		"byhand byhand-controlplane-1 init 10.9.0.2 running",
		"byhand byhand-worker-1 worker 10.9.0.3 " + worker,
	}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("show:\n%s\n%s", diff, out)
	}
}

// frozen freezes the worker, and thaws it.
func frozen(t *testing.T, u *user) {
	debug := func(verb, said string) {
		t.Helper()
		if out := u.gbctl(askBudget, "cluster", "debug", verb, "worker-1", "--name", "byhand"); out != "byhand-worker-1 "+said+"\n" {
			t.Errorf("debug %s says %q", verb, out)
		}
	}
	debug("freeze", "is frozen")
	shown(t, u, "frozen")
	// The worker doesn't answer, and the other node does.
	if out, err := e2etest.UserGbctl(t, askBudget, "-n", "10.9.0.3", "--timeout", "2s", "version"); err == nil {
		t.Errorf("a frozen node answers: %s", out)
	}
	u.gbctl(askBudget, "-n", "10.9.0.2", "version")
	debug("thaw", "runs again")
	shown(t, u, "running")
	eventually.That(t, askBudget, "the worker answers", func() error {
		_, err := e2etest.UserGbctl(t, askBudget, "-n", "10.9.0.3", "version")
		return err
	})
}

// again creates an existing cluster: it stays the same one, and becomes
// current. Other options for it are refused.
func again(t *testing.T, u *user) {
	uids := []string{"get", "nodes", "-o", "jsonpath={.items[*].metadata.uid}"}
	before := u.ask(uids...)
	u.gbctl(askBudget, "config", "use-context", "work")
	out := u.gbctl(createBudget, "cluster", "create", "--name", "byhand")
	inOrder(t, out, "waiting for API", "cluster byhand serves")
	for _, line := range []string{"generating PKI", "creating network", "after power-on"} {
		if strings.Contains(out, line) {
			t.Errorf("a cluster that runs: %q in\n%s", line, out)
		}
	}
	u.current("byhand", "admin@byhand")
	if after := u.ask(uids...); after != before {
		t.Errorf("nodes were %s, and are %s", before, after)
	}
	_, err := e2etest.UserGbctl(t, createBudget, "cluster", "create", "--name", "byhand", "--workers", "2")
	if err == nil || !strings.Contains(err.Error(), "cluster byhand exists with 1 control plane and 1 worker; remove it first, or take another name") {
		t.Errorf("created with another worker: %v", err)
	}
	shown(t, u, "running")
}

// The negative twin: a cluster that isn't ready in time stays, no message
// reports success, and the user gets hints how to inspect and remove it.
func TestClusterThatDoesNotServeInTime(t *testing.T) {
	const name = "hasty"
	u := newUser(t, name)
	out, err := e2etest.UserGbctl(t, createBudget, "cluster", "create", "--provisioner", "container", "--name", name, "--wait-timeout", "1s")
	if err == nil {
		t.Fatalf("a cluster serves after a second:\n%s", out)
	}
	for _, want := range []string{
		"cluster hasty isn't ready after 1s: waiting for " + qemu.MilestoneAPI, "The cluster is kept for inspection",
		"gbctl doctor", "gbctl cluster show --name hasty", "gbctl cluster destroy --name hasty",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q isn't in: %v", want, err)
		}
	}
	inOrder(t, out, "creating control plane nodes", "waiting for API")
	if strings.Contains(out, "serves") || strings.Contains(out, "creating worker nodes") {
		t.Errorf("it says\n%s", out)
	}
	u.untouched("work")
	if out := u.gbctl(askBudget, "cluster", "show", "--name", name); !strings.Contains(out, "running") {
		t.Errorf("show:\n%s", out)
	} else {
		t.Attr(e2etest.Booted, qemu.Container)
	}
	// As the message proposes.
	c, err := qemu.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(c.ClientConfig()); err != nil {
		t.Error(err)
	}
	u.destroy(name, "work")
}
