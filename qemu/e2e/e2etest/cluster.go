//go:build e2e

package e2etest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	// emulation is how many times slower a node under software emulation is, on
	// two cores: Go code is 6 to 15 times slower there.
	emulation = 12

	// ReadyBudget is for a node to be Ready and its DNS to answer, at native speed. The
	// design promises 15 s to Ready with nothing else on the machine.
	ReadyBudget = 45 * time.Second
	// furtherBudget is added for each further node: all nodes share this machine.
	furtherBudget = 15 * time.Second

	consoleTail = 60 // lines of each console in the message of a failed test
	askBudget   = 30 * time.Second
	// completeBudget is for further members to become voters, one after the other, and for
	// their API servers to be ready.
	completeBudget = 60 * time.Second
)

// Cluster is a cluster that is removed at the end of its test.
type Cluster struct {
	*qemu.Cluster
	t       testing.TB
	kubectl string
	// patience is the time that a command may take instead of askBudget, if it is longer.
	patience time.Duration
	inside   *osthread.Thread // where gbctl runs; nil: on this machine
	options  qemu.Options
	pace     eventually.Pace // from before the first cluster of the test
}

// Option changes how a cluster is made.
type Option func(*qemu.Options)

// Nodes sets the numbers of nodes of each type; the default is one control plane.
func Nodes(controlPlanes, workers int) Option {
	return func(o *qemu.Options) { o.ControlPlanes, o.Workers = controlPlanes, workers }
}

// Home makes one directory for several clusters of a test.
func Home(t testing.TB) Option {
	t.Helper()
	t.Setenv(homeVar, t.TempDir())
	return func(*qemu.Options) {}
}

// Ready is Start, and then waits until the cluster is Ready.
func Ready(t testing.TB, name, provisioner string, options ...Option) (*Cluster, *Mark) {
	t.Helper()
	c, m := Start(t, name, provisioner, options...)
	c.Ready(m)
	return c, m
}

// Start is New, with a Mark that measures how long the cluster takes, without
// the time for the artefacts before it.
func Start(t testing.TB, name, provisioner string, options ...Option) (*Cluster, *Mark) {
	t.Helper()
	Built(t, provisioner)
	Pace(t)
	m := Marks(t)
	c := New(t, name, provisioner, options...)
	m.Reached("power is on")
	return c, m
}

// New starts a cluster: its nodes have started when it returns. name is short,
// and no other test uses it.
func New(t testing.TB, name, provisioner string, options ...Option) *Cluster {
	t.Helper()
	made := Built(t, provisioner)
	if os.Getenv(homeVar) == "" {
		Home(t)
	}
	return up(t, newOptions(made, name, provisioner, options), made)
}

func newOptions(made *image.Artifacts, name, provisioner string, changes []Option) qemu.Options {
	o := qemu.Options{
		Name:        name,
		Provisioner: provisioner,
		Boot:        qemu.Boot{Kernel: made.Kernel, Initramfs: made.Initramfs, Rootfs: made.RootFS, Init: made.Init, Sandbox: made.Sandbox},
		Images:      made.Layout,
		Self:        []string{os.Args[0]},
	}
	for _, change := range changes {
		change(&o)
	}
	return o
}

func up(t testing.TB, o qemu.Options, made *image.Artifacts) *Cluster {
	t.Helper()
	c := &Cluster{t: t, kubectl: made.Kubectl(), options: o, pace: Pace(t)}
	t.Cleanup(func() {
		c.consoles()
		c.Down()
	})
	c.Up()
	t.Attr(Booted, o.Provisioner)
	return c
}

// consoles prints the ends of all nodes' consoles if the test failed.
func (c *Cluster) consoles() {
	c.t.Helper()
	if !c.t.Failed() || c.Cluster == nil {
		return
	}
	for _, n := range c.Nodes {
		c.t.Logf("the console of %s ends with:\n%s", n.Name, c.tail(n.Name))
	}
}

// Up starts the cluster. New has done this once.
func (c *Cluster) Up() {
	c.t.Helper()
	var err error
	if c.Cluster, err = qemu.Up(c.t.Context(), c.options); err != nil {
		c.t.Fatalf("up: %v", err)
	}
}

// Down removes the cluster. The end of the test does this in any case.
func (c *Cluster) Down() {
	c.t.Helper()
	// Not with the test's context, which may have ended.
	if err := qemu.Down(context.Background(), c.options.Name); err != nil {
		c.t.Errorf("down: %v", err)
	}
}

// In returns the cluster for a subtest, with a testing.T of its own.
func (c *Cluster) In(t testing.TB) *Cluster {
	part := *c
	part.t = t
	return &part
}

// T returns the test that the cluster belongs to.
func (c *Cluster) T() testing.TB { return c.t }

// Node returns the name of the first node, the only one in most tests.
func (c *Cluster) Node() string { return c.Nodes[0].Name }

// Scale multiplies a time at native speed by the slowness of this cluster's nodes. Package
// eventually adds the slowness of this machine.
func (c *Cluster) Scale(d time.Duration) time.Duration {
	if c.Accelerator == "tcg" {
		return d * emulation
	}
	return d
}

// Promised returns nil if the time from start to end was no longer than the promise to
// users, at the pace that this machine had before the test's first cluster.
func (c *Cluster) Promised(start, end time.Time, promise time.Duration) error {
	return c.pace.Kept(start, end, c.Scale(promise))
}

// Eventually waits until check returns nil; the budget is for native speed.
func (c *Cluster) Eventually(budget time.Duration, name string, check func() error) {
	c.t.Helper()
	eventually.That(c.t, c.Scale(budget), name, check)
}

// Ready waits until all nodes are Ready and the cluster's DNS answers, and prints when each
// milestone was reached.
func (c *Cluster) Ready(m *Mark) {
	c.t.Helper()
	budget := ReadyBudget + time.Duration(len(c.Nodes)-1)*furtherBudget
	ctx, cancel := eventually.Context(c.t.Context(), c.Scale(budget))
	defer cancel()
	if err := c.WaitReady(ctx, func(s qemu.Milestone) { m.Reached(s.What) }, nil); err != nil {
		c.t.Fatal(err)
	}
}

// Text returns the first node's console.
func (c *Cluster) Text() string {
	c.t.Helper()
	return c.text(c.Node())
}

func (c *Cluster) text(node string) string {
	c.t.Helper()
	data, err := os.ReadFile(c.Console(node))
	if err != nil && !os.IsNotExist(err) {
		c.t.Fatal(err)
	}
	return string(data)
}

func (c *Cluster) tail(node string) string {
	lines := strings.Split(strings.TrimRight(c.text(node), "\n"), "\n")
	return strings.Join(lines[max(len(lines)-consoleTail, 0):], "\n")
}

// own matches the lines of Garboard on the console, after the time since the boot.
var own = regexp.MustCompile(`^\[ *([0-9.]+)\] \[garboard\] (.*)$`)

// A Line is a line of Garboard on the console.
type Line struct {
	At   time.Duration // since the boot
	Text string
}

// Lines returns Garboard's lines from an offset of the console on.
func (c *Cluster) Lines(offset int) []Line {
	c.t.Helper()
	var all []Line
	for line := range strings.Lines(c.Text()[offset:]) {
		m := own.FindStringSubmatch(strings.TrimRight(line, "\r\n"))
		if m == nil {
			continue
		}
		at, err := time.ParseDuration(m[1] + "s")
		if err != nil {
			c.t.Fatalf("console: %v in %q", err, line)
		}
		all = append(all, Line{at, m[2]})
	}
	return all
}

// Says waits until one line of the console, from the offset on, contains all the parts, and
// returns it.
func (c *Cluster) Says(budget time.Duration, offset int, parts ...string) Line {
	c.t.Helper()
	var found Line
	c.Eventually(budget, fmt.Sprintf("the console has a line with %q", parts), func() error {
		for _, line := range c.Lines(offset) {
			if containsAll(line.Text, parts) {
				found = line
				return nil
			}
		}
		return fmt.Errorf("it hasn't yet, in %d lines", len(c.Lines(offset)))
	})
	return found
}

func containsAll(text string, parts []string) bool {
	for _, p := range parts {
		if !strings.Contains(text, p) {
			return false
		}
	}
	return true
}

// Try runs the kubectl that was built with the cluster.
func (c *Cluster) Try(args ...string) (string, error) { return c.TryWith("", args...) }

// TryWith is Try with standard input.
func (c *Cluster) TryWith(stdin string, args ...string) (string, error) {
	ctx, cancel := eventually.Context(c.t.Context(), c.Scale(askBudget))
	defer cancel()
	cmd := exec.CommandContext(ctx, c.kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// wrong matches errors of manifests that no repetition heals.
var wrong = regexp.MustCompile(`BadRequest|error parsing|is invalid:`)

// passing matches errors of a cluster that temporarily can't answer: its etcd
// elects a leader or waits for a disk, or an API server is replaced. The
// request may have been executed despite the error.
var passing = regexp.MustCompile(`etcdserver: |request timed out|deadline exceeded|[Tt]imeout|connection (refused|reset)|EOF|server is currently unable`)

// Kubectl is Try; an error fails the test. If there was no answer, it repeats
// the command, like a user.
func (c *Cluster) Kubectl(args ...string) (out string) {
	c.t.Helper()
	tried := false
	c.Eventually(askBudget, "kubectl "+args[0], func() (err error) {
		out, err = c.Try(args...)
		if tried && done(args[0], err) {
			return nil
		}
		if err != nil && !passing.MatchString(err.Error()) {
			c.t.Fatal(err)
		}
		tried = true
		return err
	})
	return out
}

// TryWrite is Try for a check that is repeated: an earlier attempt may have been executed.
func (c *Cluster) TryWrite(args ...string) error {
	_, err := c.Try(args...)
	if done(args[0], err) {
		return nil
	}
	return err
}

// done reports whether the error means that an earlier attempt was executed.
func done(verb string, err error) bool {
	return err != nil && ((verb == "create" || verb == "run") && strings.Contains(err.Error(), "AlreadyExists") ||
		verb == "delete" && strings.Contains(err.Error(), "NotFound"))
}

// Complete waits until all control planes vote in etcd and their API servers are ready.
// This can be long after the cluster is Ready.
func (c *Cluster) Complete() {
	c.t.Helper()
	all := c.ControlPlanes()
	c.Eventually(completeBudget, "all control planes vote and serve", func() error {
		out, err := c.TryGbctl("-n", all[0].Address.String(), "etcd", "members")
		if err == nil && strings.Count(out, " yes ") != len(all) {
			err = fmt.Errorf("members are\n%s", out)
		}
		if err != nil {
			return err
		}
		// Each API server that is ready adds its address here.
		out, err = c.Try("get", "endpointslice", "kubernetes", "-o", "jsonpath={.endpoints[*].addresses[*]}")
		for _, n := range all {
			if err == nil && !slices.Contains(strings.Fields(out), n.Address.String()) {
				err = fmt.Errorf("API servers are at %s", out)
			}
		}
		return err
	})
}

// NodesReady returns nil if Kubernetes has these nodes, no others, and all are Ready.
func (c *Cluster) NodesReady(nodes ...qemu.Node) error {
	out, err := c.Try("get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}`)
	if err != nil {
		return err
	}
	var want []string
	for _, n := range nodes {
		want = append(want, n.Name+"=True")
	}
	got := strings.Fields(out)
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("nodes are %v, not %v", got, want)
	}
	return nil
}

// Apply applies manifests. It repeats the command, like a user: a member of
// etcd that has just joined may be the next leader.
func (c *Cluster) Apply(manifests string) {
	c.t.Helper()
	c.Eventually(askBudget, "the manifests are applied", func() error {
		_, err := c.TryWith(manifests, "apply", "-f", "-")
		if err != nil && wrong.MatchString(err.Error()) {
			c.t.Fatal(err)
		}
		return err
	})
}

// ContainerID returns the ID of the container of a pod in the namespace default, once it is
// ready.
func (c *Cluster) ContainerID(pod string) (string, error) {
	out, err := c.Try("get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[?(@.ready==true)].containerID}")
	if err == nil && out == "" {
		err = fmt.Errorf("pod %s isn't ready", pod)
	}
	return out, err
}

// Web is the name of the pod of RunWeb.
const Web = "web"

// web serves a file with what is in every image of a program of Kubernetes.
const web = `
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default}
spec:
  tolerations: [{operator: Exists}]
  containers:
  - name: web
    image: IMAGE
    command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8080, --accept-hosts=.*, --www=/etc/ssl/certs, --www-prefix=/certs/]
    readinessProbe: {httpGet: {path: /certs/ca-certificates.crt, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
`

// RunWeb starts a pod that only the test ends, and returns the ID of its container.
func (c *Cluster) RunWeb(budget time.Duration, image string) (id string) {
	c.t.Helper()
	c.Apply(strings.ReplaceAll(web, "IMAGE", image))
	c.Eventually(budget, "the pod is ready", func() (err error) {
		id, err = c.ContainerID(Web)
		return err
	})
	return id
}
