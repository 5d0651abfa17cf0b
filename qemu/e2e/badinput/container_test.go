//go:build e2e

// Package badinput tests wrong input and broken parts. Each ends in one line on
// the console: what is wrong, where, and what the machine does next. Each also
// has a counterpart, which is corrected and continues.
package badinput

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	sayBudget = 15 * time.Second // for a node to report what is wrong
	// mendBudget is for a node to notice the correction: it looks again within 30
	// s, the longest pause between two attempts.
	mendBudget = 45 * time.Second
	// tellBudget is for the doctor to report a full disk, and backBudget for services that are
	// restarted with growing pauses, up to two minutes.
	tellBudget = 60 * time.Second
	backBudget = 150 * time.Second
)

// edit changes the first configuration of a node.
func edit(change func([]byte) []byte) e2etest.Option {
	return func(o *qemu.Options) {
		o.Prepare = func(dir string) error { return rewrite(filepath.Join(dir, "config.yaml"), change) }
	}
}

// rewrite changes a file in place: the node has it bound.
func rewrite(path string, change func([]byte) []byte) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, change(data), 0o600)
}

// replaced is data with old, which must be there, replaced by new.
func replaced(t *testing.T, data []byte, old, new string) []byte {
	t.Helper()
	if !bytes.Contains(data, []byte(old)) {
		t.Fatalf("the configuration has no %q", old)
	}
	return bytes.Replace(data, []byte(old), []byte(new), 1)
}

// oneLine checks that only one line reports it, until something changes.
func oneLine(t *testing.T, c *e2etest.Cluster, offset int, part string) {
	t.Helper()
	var found []string
	for _, line := range c.Lines(offset) {
		// "not up yet" repeats every service's last message, every 10 s.
		if strings.Contains(line.Text, part) && !strings.HasPrefix(line.Text, "not up yet") {
			found = append(found, line.Text)
		}
	}
	if len(found) != 1 {
		t.Errorf("%d lines tell of %q, not one:\n%s", len(found), part, strings.Join(found, "\n"))
	}
}

// An invalid configuration is reported with its place, and the node waits for a
// better one.
func TestBadConfiguration(t *testing.T) {
	var good []byte
	c := e2etest.New(t, "bad-config", qemu.Container, edit(func(data []byte) []byte {
		good = data
		return data[:bytes.Index(data, []byte("cluster:"))-20] // in the middle of a value
	}))
	path := filepath.Join(c.Dir(), c.Node(), "config.yaml")
	put := func(data []byte) int {
		t.Helper()
		offset := len(c.Text())
		if err := rewrite(path, func([]byte) []byte { return data }); err != nil {
			t.Fatal(err)
		}
		return offset
	}

	line := c.Says(sayBudget, 0, "machined: Starting: ", "no usable configuration", "seed:", "looking again in")
	t.Log(line.Text)
	oneLine(t, c, 0, "no usable configuration")
	offset := put(replaced(t, good, " type: init\n", " typ: init\n"))
	line = c.Says(mendBudget, offset, "machined: Starting: ", "no usable configuration", "seed:", "machine.typ", "did you mean type", "looking again in")
	t.Log(line.Text)
	oneLine(t, c, offset, "machine.typ")
	offset = put(good)
	c.Says(mendBudget, offset, "machined: Running (up): configuration from seed")
}

// An image that is in no registry is reported with its name and the places
// where it was looked for; the node tries again.
func TestMissingImage(t *testing.T) {
	const missing = "registry.k8s.io/etcd:0.0.0-missing"
	var good []byte
	c := e2etest.New(t, "bad-image", qemu.Container, edit(func(data []byte) []byte {
		good = data
		at := bytes.Index(data, []byte("registry.k8s.io/etcd:"))
		end := at + bytes.IndexByte(data[at:], '\n')
		return append(append(bytes.Clone(data[:at]), missing...), data[end:]...)
	}))
	line := c.Says(sayBudget, 0, "etcd: Failed: ", missing, "machine.registries.mirrors", "not found", "next try in")
	t.Log(line.Text)

	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if err := rewrite(filepath.Join(c.Dir(), c.Node(), "state", "config.yaml"), func([]byte) []byte { return good }); err != nil {
		t.Fatal(err)
	}
	offset := len(c.Text())
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	c.Says(sayBudget, offset, "etcd: Running (up)")
}

// A full disk is reported as such. The node continues after there is room.
func TestFullDisk(t *testing.T) {
	if !e2etest.InOwnMounts(t) {
		return
	}
	full := ""
	c := e2etest.New(t, "bad-full", qemu.Container, func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			full = filepath.Join(dir, "var")
			if err := os.Mkdir(full, 0o755); err != nil {
				return err
			}
			return unix.Mount("full", full, "tmpfs", 0, "size=48m")
		}
	})
	t.Cleanup(func() {
		// Otherwise the directory can't be removed.
		if err := unix.Unmount(full, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	line := c.Says(sayBudget, 0, "Failed: ", "the disk is full: /var (EPHEMERAL) has no room in its 48 MiB for image", "next try in")
	t.Log(line.Text)
	offset := len(c.Text())
	if err := unix.Mount("", full, "", unix.MS_REMOUNT, "size=2g"); err != nil {
		t.Fatal(err)
	}
	c.Says(mendBudget, offset, "etcd: Running (up)")
	c.Ready(e2etest.Marks(t))
	fullAtWork(c, full)
}

// fullAtWork: the doctor says that the disk is full. The node's own API works, and takes a
// change. Kubernetes takes writes when there is room again.
func fullAtWork(c *e2etest.Cluster, dir string) {
	t := c.T()
	t.Helper()
	filler := filepath.Join(dir, "filler")
	c.Eventually(tellBudget, "the doctor tells of disk-full", func() error {
		if err := fill(filler); err != nil { // again: the kubelet removes images
			return err
		}
		out, err := c.TryGbctl("doctor")
		if err == nil || !strings.Contains(out, "disk-full") || !strings.Contains(out, "EPHEMERAL (/var) has") {
			return fmt.Errorf("doctor: %v\n%s", err, out)
		}
		return nil
	})
	c.Gbctl("patch", "mc", "--immediate", "-p", `machine: {sysctls: {net.ipv4.ip_default_ttl: "63"}}`)
	state, err := os.ReadFile(filepath.Join(c.Dir(), c.Node(), "state", "config.yaml"))
	if err != nil || !strings.Contains(string(state), "ip_default_ttl") {
		t.Errorf("the configuration on STATE isn't what was applied: %v\n%s", err, state)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	c.Eventually(backBudget, "Kubernetes takes writes", func() error { return c.TryWrite("create", "configmap", "again") })
	c.Eventually(backBudget, "the doctor doesn't tell of a full disk any more", func() error {
		if out, err := c.TryGbctl("doctor"); strings.Contains(out, "disk-full") {
			return fmt.Errorf("doctor: %v\n%s", err, out)
		}
		return nil
	})
}

// fill makes a file larger until the file system of its directory is full.
func fill(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, size := range []int{1 << 20, 1 << 12} {
		for block := make([]byte, size); err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			return err
		}
		err = nil
	}
	return nil
}
