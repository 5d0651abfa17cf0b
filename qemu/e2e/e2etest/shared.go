//go:build e2e

package e2etest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

// shared is the common cluster of this package's tests. Tests that share do not
// run in parallel, so it needs no lock.
var shared struct {
	*Cluster
	home   string
	failed bool // a test failed with it: the next test gets a new one
}

// Shared is Ready with a cluster that other tests of the package use, too: the
// first test makes it, and the end of the test program removes it. A test must
// leave it unchanged.
func Shared(t testing.TB, name, provisioner string, options ...Option) (*Cluster, *Mark) {
	t.Helper()
	made := Built(t, provisioner)
	m := Marks(t)
	if shared.failed {
		if err := endShared(); err != nil {
			t.Fatal(err)
		}
	}
	if shared.Cluster == nil {
		pace := Pace(t)
		dir, err := os.MkdirTemp("", "garboard-e2e-")
		if err != nil {
			t.Fatal(err)
		}
		shared.home = filepath.Join(dir, "home")
		os.Setenv(homeVar, shared.home)
		shared.Cluster = &Cluster{t: t, kubectl: made.Kubectl(), options: newOptions(made, name, provisioner, options), pace: pace}
		shared.failed = true // until it is up
		shared.Up()
		shared.failed = false
		t.Attr(Booted, provisioner)
		m.Reached("power is on")
	}
	c := shared.In(t)
	t.Cleanup(func() {
		c.consoles()
		shared.failed = t.Failed()
	})
	c.Ready(m)
	return c, m
}

// endShared removes the cluster and its directory.
func endShared() error {
	if shared.home == "" {
		return nil
	}
	os.Setenv(homeVar, shared.home)
	defer os.Unsetenv(homeVar)
	if err := qemu.Down(context.Background(), shared.options.Name); err != nil {
		return fmt.Errorf("remove the shared cluster: %w", err)
	}
	err := os.RemoveAll(filepath.Dir(shared.home))
	shared.Cluster, shared.home, shared.failed = nil, "", false
	return err
}
