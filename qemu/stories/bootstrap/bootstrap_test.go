//go:build story

// Package bootstrap is the story of a control plane that waits until a person
// begins the cluster on it, once.
package bootstrap

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
)

func TestMain(m *testing.M) { story.Main(m) }

// waitBudget is for the node to boot, and to pull the image of etcd.
const waitBudget = 60 * time.Second

// S-212, S-213, S-355: it waits and says for what, begins when told to, and says so
// when told again; what would end the cluster is refused.
func TestBootstrap(t *testing.T) {
	c := story.New(t, "bootstrap", qemu.Container, controlPlane)
	c.Says(waitBudget, 0, "etcd: Preparing", "Waiting for bootstrap, or for a control plane to join at https://")
	says := func(part string, args ...string) {
		t.Helper()
		if out := c.Gbctl(args...); !strings.Contains(out, part) {
			t.Errorf("gbctl %s: %s", strings.Join(args, " "), out)
		}
	}
	refuses := func(part string, args ...string) {
		t.Helper()
		if out, err := c.TryGbctl(args...); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("gbctl %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	says("the cluster begins on this node", "bootstrap")
	c.Ready(story.Marks(t))
	says("begun on this node already", "bootstrap")
	says(c.Node(), "etcd", "members")
	says("leader", "etcd", "status")
	refuses("the last voting member", "etcd", "leave")
	database := filepath.Join(t.TempDir(), "etcd.db")
	c.Gbctl("etcd", "snapshot", database)
	if info, err := os.Stat(database); err != nil || info.Size() < 100<<10 {
		t.Errorf("a snapshot of %v, %v", info, err)
	}
}

// controlPlane makes the node one that doesn't begin by itself.
func controlPlane(o *qemu.Options) {
	o.Prepare = func(dir string) error {
		path := filepath.Join(dir, "config.yaml")
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, bytes.Replace(data, []byte(" type: init\n"), []byte(" type: controlplane\n"), 1), 0o600)
	}
}
