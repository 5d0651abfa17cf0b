//go:build e2e && long

// Package full tests a node whose EPHEMERAL is completely full while it works.
// Kubernetes stops, and the node reports why. The node's own API and STATE work
// as before. After there is room again, everything continues without a reboot.
package full

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// diskSize is for images, their layers and data: about 1 GiB.
	diskSize = 3 << 30
	// tellBudget is for doctor to report it, and for etcd to need a new block.
	tellBudget = 60 * time.Second
	// writeBudget is for a write when there is room: one that takes longer fails.
	writeBudget = 10 * time.Second
	// backBudget is for services that are restarted with growing pauses, up to two minutes.
	backBudget = 150 * time.Second
	// bulk is the size of one write: larger than the free space that etcd has in its file.
	bulk = 256 << 10
)

func TestFullEphemeralInContainer(t *testing.T) {
	if !e2etest.InOwnMounts(t) {
		return
	}
	ephemeral := ""
	c := full(t, "full", qemu.Container, func(o *qemu.Options) {
		o.Prepare = func(dir string) (err error) {
			ephemeral = filepath.Join(dir, "var")
			err = disk(filepath.Join(t.TempDir(), "disk.img"), ephemeral)
			t.Cleanup(func() {
				// Otherwise the directory can't be removed.
				if err := unix.Unmount(ephemeral, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			return err
		}
	})
	whole(t, filepath.Join(c.Dir(), c.Node(), "state"))
}

// full is the test for both kinds of nodes.
func full(t *testing.T, name, provisioner string, options ...e2etest.Option) *e2etest.Cluster {
	c, m := e2etest.Ready(t, name, provisioner, append(options, e2etest.WithImage(t, fillerImage, "filler"))...)
	c.Kubectl("create", "configmap", "written")

	f := newFiller(t, c)
	m.Reached("a pod waits to fill the disk")
	if err := f.fill(); err != nil {
		t.Fatal(err)
	}
	m.Reached("the disk is full")
	c.Eventually(tellBudget, "the doctor tells of disk-full", func() error {
		if err := says(c, "disk-full", "EPHEMERAL (/var) has"); err != nil {
			return errors.Join(err, f.fill()) // the kubelet may have freed space: it removes images
		}
		return nil
	})
	m.Reached("the doctor says so")
	c.Eventually(tellBudget, "etcd takes no writes any more", func() error {
		if err := refuses(c); err != nil {
			return errors.Join(err, f.fill())
		}
		return nil
	})
	m.Reached("etcd takes no writes any more")
	c.Eventually(tellBudget, "the doctor has it from a service", func() error {
		if err := says(c, "disk-full", unix.ENOSPC.Error()); err != nil {
			return errors.Join(err, f.fill(), refuses(c)) // a write may have failed only because it was slow
		}
		return nil
	})
	m.Reached("the doctor has it from a service")
	// It was kept in memory, because there is no room to write it.
	c.Eventually(tellBudget, "etcd says that the disk is full", func() error {
		log, err := c.TryGbctl("logs", "etcd")
		if err == nil && !strings.Contains(log, unix.ENOSPC.Error()) {
			err = errors.Join(fmt.Errorf("its log has nothing of that:\n%s", log), f.fill(), refuses(c))
		}
		return err
	})
	usable(t, c)
	m.Reached("the machine API works")

	f.release()
	m.Reached("the pod ends, and there is room again")
	c.Eventually(backBudget, "Kubernetes takes writes", func() error {
		return c.TryWrite("create", "configmap", "again")
	})
	m.Reached("Kubernetes takes writes")
	c.Kubectl("get", "configmap", "written")
	c.Eventually(backBudget, "the node is Ready", func() error { return c.NodesReady(c.Nodes...) })
	c.Eventually(backBudget, "the doctor finds no error", func() error {
		_, err := c.TryGbctl("doctor")
		return err
	})
	m.Reached("all is well")
	status, err := c.Status(t.Context())
	if err != nil || status[0].Restarts != 0 {
		t.Errorf("the node has started again: %+v, %v", status, err)
	}
	return c
}

// disk mounts a file system like a node's own EPHEMERAL.
func disk(image, dir string) error {
	f, err := os.Create(image)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(diskSize), f.Close(), os.Mkdir(dir, 0o755)); err != nil {
		return err
	}
	for _, args := range [][]string{{"mkfs.xfs", "-q", image}, {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// refuses is nil after a write of some size has failed permanently.
func refuses(c *e2etest.Cluster) error {
	value := bytes.Repeat([]byte{'x'}, bulk)
	path := filepath.Join(c.Dir(), "value")
	if err := os.WriteFile(path, value, 0o600); err != nil {
		return err
	}
	out, err := c.Try("create", "configmap", fmt.Sprintf("bulk-%d", time.Now().UnixNano()), "--from-file="+path, "--request-timeout="+eventually.Scale(c.Scale(writeBudget)).Round(time.Second).String())
	if err == nil {
		return fmt.Errorf("it takes one: %s", out)
	}
	return nil
}

// says is nil if doctor reports the problem, with these words.
func says(c *e2etest.Cluster, id, words string) error {
	out, err := c.TryGbctl("doctor")
	if err == nil {
		return fmt.Errorf("it finds nothing: %s", out)
	}
	if !strings.Contains(out, id) || !strings.Contains(out, words) {
		return fmt.Errorf("it says: %s", out)
	}
	return nil
}

// usable: the node's own API answers, and accepts a change, because that is on STATE.
func usable(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	for _, args := range [][]string{{"version"}, {"services"}, {"logs", "etcd"}, {"dmesg"}, {"ls", "/var"}} {
		if out := c.Gbctl(args...); out == "" {
			t.Errorf("gbctl %s says nothing", strings.Join(args, " "))
		}
	}
	c.Gbctl("patch", "machineconfig", "--patch", `{"machine":{"sysctls":{"net.ipv4.ip_default_ttl":"63"}}}`)
	if config := c.Gbctl("get", "machineconfig", "-o", "yaml"); !strings.Contains(config, "ip_default_ttl") {
		t.Errorf("the configuration isn't what was applied:\n%s", config)
	}
}

// whole: files on STATE are complete, including the configuration.
func whole(t *testing.T, state string) {
	t.Helper()
	config, err := os.ReadFile(filepath.Join(state, "config.yaml"))
	if err != nil || !strings.Contains(string(config), "ip_default_ttl") {
		t.Errorf("the configuration on STATE isn't what was applied: %v\n%s", err, config)
	}
	err = filepath.WalkDir(state, func(path string, entry os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".json" {
			return err
		}
		data, err := os.ReadFile(path)
		if err == nil && !json.Valid(data) {
			err = fmt.Errorf("%s isn't whole: %q", path, data)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
