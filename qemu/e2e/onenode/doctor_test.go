//go:build e2e

package onenode

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// tellBudget is for a fault to be detected: an API server that is replaced may use its
	// whole termination grace period of 30 s, and the new one must have ended once or twice.
	tellBudget = 60 * time.Second
	// mendBudget is for the repaired part to work again: the kubelet restarts a
	// container with growing pauses.
	mendBudget = 60 * time.Second
)

// finding is a finding in gbctl doctor -o yaml.
type finding struct {
	Severity string   `yaml:"severity"`
	ID       string   `yaml:"id"`
	What     string   `yaml:"what"`
	Why      string   `yaml:"why"`
	Next     string   `yaml:"next"`
	Evidence []string `yaml:"evidence"`
}

func (f finding) String() string {
	return fmt.Sprintf("%s %s: %s\n  why: %s\n  next: %s\n  %s", f.Severity, f.ID, f.What, f.Why, f.Next, strings.Join(f.Evidence, "\n  "))
}

// diagnose runs doctor like a user. The exit code only says whether there is an
// error, so it isn't checked here.
func diagnose(c *e2etest.Cluster) ([]finding, error) {
	out, err := c.TryGbctl("doctor", "-o", "yaml")
	var document struct {
		Findings []finding `yaml:"findings"`
		Checked  []string  `yaml:"checked"`
	}
	if e := yaml.Unmarshal([]byte(out), &document); e != nil || len(document.Checked) == 0 {
		return nil, fmt.Errorf("gbctl doctor: %w: %s", err, out)
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

// tells waits until doctor's first finding has this ID and all of the words.
func tells(t *testing.T, c *e2etest.Cluster, severity, id string, words ...string) {
	t.Helper()
	c.Eventually(tellBudget, "gbctl doctor tells of "+id, func() error {
		found, err := diagnose(c)
		if err != nil {
			return err
		}
		if len(found) == 0 || found[0].ID != id || !strings.Contains(strings.ToUpper(found[0].Severity), severity) {
			return fmt.Errorf("it tells:\n%s", all(found))
		}
		for _, w := range words {
			if !strings.Contains(found[0].String(), w) {
				return fmt.Errorf("nothing of %q in:\n%s", w, all(found))
			}
		}
		t.Logf("\n%s", all(found))
		return nil
	})
}

// well waits until there is no finding.
func well(c *e2etest.Cluster) {
	c.Eventually(mendBudget, "gbctl doctor finds nothing", func() error {
		found, err := diagnose(c)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("it tells:\n%s", all(found))
		}
		return err
	})
}

// The conditions of the guide on one node, one after the other, each repaired again.
func TestDoctor(t *testing.T) {
	c, _ := e2etest.Shared(t, name, qemu.Container)
	well(c)
	began := time.Now()
	if out := c.Gbctl("doctor"); !strings.Contains(out, "nothing is wrong") {
		t.Errorf("a healthy node: %s", out)
	}
	t.Logf("a healthy node is looked at in %s", time.Since(began).Round(time.Millisecond))

	for _, fault := range []struct {
		name, patch string
		mend        string // a patch; "" rolls back
		id          string
		words       []string
	}{
		{
			"an argument of the kubelet", `{machine: {kubelet: {extraArgs: {no-such-flag: "1"}}}}`, `{machine: {kubelet: {extraArgs: {no-such-flag: null}}}}`,
			"kubelet-not-running", []string{"machine.kubelet.extraArgs", "no-such-flag", "unknown flag: --no-such-flag"},
		},
		{
			"an argument of the API server", `{cluster: {apiServer: {extraArgs: {no-such-flag: "1"}}}}`, "",
			"apiserver-not-running", []string{"cluster.apiServer.extraArgs", "no-such-flag", "unknown flag: --no-such-flag"},
		},
	} {
		t.Run(fault.name, func(t *testing.T) {
			c := c.In(t)
			c.Gbctl("patch", "mc", "-p", fault.patch)
			tells(t, c, "ERROR", fault.id, fault.words...)
			if fault.mend != "" {
				c.Gbctl("patch", "mc", "-p", fault.mend)
			} else {
				c.Gbctl("config", "rollback")
			}
			well(c)
		})
	}
}

// edit changes the first configuration of a node.
func edit(old, new string) e2etest.Option {
	return func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			path := filepath.Join(dir, "config.yaml")
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !bytes.Contains(data, []byte(old)) {
				return fmt.Errorf("%s has no %q", path, old)
			}
			return os.WriteFile(path, bytes.Replace(data, []byte(old), []byte(new), 1), 0o600)
		}
	}
}

// An API server that has never run: the kubelet refuses all clients then, and
// only its log has the reason.
func TestImageFromTheFirstBoot(t *testing.T) {
	c := e2etest.New(t, "doctor-image", qemu.Container, edit("registry.k8s.io/kube-apiserver:", "registry.k8s.io/kube-apiserver:v0.0.0-"))
	tells(t, c, "ERROR", "image-pull-failing", "kube-apiserver", "v0.0.0-", "no image with this name")
}

// A control plane without a bootstrap reports what it waits for: during its
// first minutes that is no error.
func TestWaitsForBootstrap(t *testing.T) {
	c := e2etest.New(t, "doctor-join", qemu.Container, edit(" type: init\n", " type: controlplane\n"))
	tells(t, c, "INFO", "etcd-waits-for-bootstrap", "/var/lib/etcd is empty", "controlplane")
}

// The data of an older installation: the case of a reinstallation on a disk
// that wasn't wiped.
func TestOldEtcdData(t *testing.T) {
	home := e2etest.Home(t)
	kept := filepath.Join(t.TempDir(), "etcd")
	old, _ := e2etest.Ready(t, "doctor-old", qemu.Container, home)
	if err := old.Cut(t.Context(), old.Node()); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", filepath.Join(old.Dir(), old.Node(), "var", "lib", "etcd"), kept).CombinedOutput(); err != nil {
		t.Fatalf("keep etcd's data: %v: %s", err, out)
	}
	old.Down()
	c := e2etest.New(t, "doctor-new", qemu.Container, home, func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			to := filepath.Join(dir, "var", "lib")
			if err := os.MkdirAll(to, 0o755); err != nil {
				return err
			}
			out, err := exec.Command("cp", "-a", kept, filepath.Join(to, "etcd")).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
	})
	tells(t, c, "ERROR", "etcd-foreign-data", "cluster.secret", "/registry/secrets/", "transform")
}
