//go:build e2e

package e2etest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// gbctl builds the program once for all tests of a test program, as `make gbctl` does.
var gbctl = sync.OnceValues(func() (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	program := filepath.Join(root, "out", "gbctl")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./tools/gbctl")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build gbctl: %w: %s", err, out)
	}
	return program, nil
})

// Access is how the machine APIs of the nodes are asked without gbctl.
func (c *Cluster) Access() *client.Context {
	c.t.Helper()
	file, err := client.Load(c.ClientConfig())
	if err != nil {
		c.t.Fatal(err)
	}
	who, err := file.Current("")
	if err != nil {
		c.t.Fatal(err)
	}
	return who
}

// Patient returns the cluster for commands that take as long as this at native speed.
func (c *Cluster) Patient(budget time.Duration) *Cluster {
	patient := *c
	patient.patience = budget
	return &patient
}

// Inside returns the cluster with gbctl in the nodes' network, where it can use addresses
// that have no port on this machine.
func (c *Cluster) Inside(network *osthread.Thread) *Cluster {
	inside := *c
	inside.inside = network
	return &inside
}

// TryGbctl runs gbctl as a user would: with the cluster's client configuration
// and nothing else. The output is standard output alone.
func (c *Cluster) TryGbctl(args ...string) (string, error) { return c.TryGbctlWith("", nil, args...) }

// TryGbctlWith is TryGbctl with standard input and environment variables.
func (c *Cluster) TryGbctlWith(stdin string, env []string, args ...string) (string, error) {
	return runGbctl(c.t, c.inside, c.Scale(max(c.patience, askBudget)), stdin, append([]string{"GARBOARDCONFIG=" + c.ClientConfig()}, env...), args...)
}

// UserGbctl runs gbctl with only the test's environment, like a user with files
// of their own. The budget is for native speed.
func UserGbctl(t testing.TB, budget time.Duration, args ...string) (string, error) {
	t.Helper()
	return runGbctl(t, nil, budget, "", nil, args...)
}

// GbctlIn is UserGbctl in a network namespace.
func GbctlIn(t testing.TB, inside *osthread.Thread, budget time.Duration, args ...string) (string, error) {
	t.Helper()
	return runGbctl(t, inside, budget, "", nil, args...)
}

// InterruptedGbctl is UserGbctl with Ctrl-C as soon as it has printed a line. It returns
// all output and the exit code.
func InterruptedGbctl(t testing.TB, budget time.Duration, line string, args ...string) (output string, exitCode int) {
	t.Helper()
	program, err := gbctl()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := eventually.Context(t.Context(), budget)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for lines := bufio.NewScanner(pipe); lines.Scan(); {
		fmt.Fprintln(&all, lines.Text())
		if lines.Text() == line {
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Errorf("interrupt gbctl: %v", err)
			}
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Errorf("gbctl %s: %v", strings.Join(args, " "), err)
	}
	return all.String(), cmd.ProcessState.ExitCode()
}

// Gbctl runs gbctl for a command that connects to no node. An error fails the test.
func Gbctl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := runGbctl(t, nil, askBudget, "", nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func runGbctl(t testing.TB, inside *osthread.Thread, budget time.Duration, stdin string, env []string, args ...string) (string, error) {
	program, err := gbctl()
	if err != nil {
		return "", err
	}
	ctx, cancel := eventually.Context(t.Context(), budget)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := cmd.Start
	if inside != nil {
		start = func() error { return inside.Do(cmd.Start) }
	}
	if err = start(); err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return stdout.String(), fmt.Errorf("gbctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Gbctl is TryGbctl where an error fails the test.
func (c *Cluster) Gbctl(args ...string) string {
	c.t.Helper()
	out, err := c.TryGbctl(args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// Healthy waits until all control planes serve, and each node is healthy: operations on all
// nodes begin only then.
func (c *Cluster) Healthy() {
	c.t.Helper()
	c.Complete()
	var all []string
	for _, n := range c.Nodes {
		all = append(all, n.Address.String())
	}
	c.Eventually(completeBudget, "all nodes are healthy", func() error {
		out, err := c.TryGbctl("-n", strings.Join(all, ","), "health")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}

// Row reports whether a table has a row with all of these fields.
func Row(table string, parts ...string) bool {
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if !slices.ContainsFunc(parts, func(p string) bool { return !slices.Contains(fields, p) }) {
			return true
		}
	}
	return false
}

// KnowsServers returns nil if a node knows the API servers of the others, as
// ready ones, from Kubernetes. An API server publishes its address after it is
// ready, which may be long after its node is Ready. If it is killed before
// that, the node may have no address of a running one.
func (c *Cluster) KnowsServers(n qemu.Node, of ...qemu.Node) error {
	out, err := c.TryGbctl("-n", n.Address.String(), "get", "apiservers")
	if err != nil {
		return err
	}
	for _, server := range of {
		if !Row(out, netip.AddrPortFrom(server.Address, apiServerPort).String(), "true", "kubernetes") {
			return fmt.Errorf("%s doesn't know %s:\n%s", n.Name, server.Name, out)
		}
	}
	return nil
}
