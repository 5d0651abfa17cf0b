package services

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/udev"
)

// The tables of node.go make a graph without cycles or unknown names, and no two
// controllers write one type, on both kinds of machine.
func TestNodeFitsTogether(t *testing.T) {
	t.Parallel()
	for _, mode := range []boot.Mode{boot.Machine, boot.Container} {
		n, err := NewNode(Options{Mode: mode, Processes: process.New(), Logs: logs.New(io.Discard)})
		if err != nil {
			t.Fatalf("%s: %v", mode, err)
		}
		// S-230, Q-14: the IDs that users know.
		for _, id := range []string{"apid", "trustd", "udevd", "machined", "disks", "networkd", "timed", "containerd", "etcd", "kubelet", "vip"} {
			if _, ok := n.graph.Status(id); !ok {
				t.Errorf("%s: there is no service %q", mode, id)
			}
		}
	}
}

// The services that an extension may depend on are there.
func TestServicesForExtensions(t *testing.T) {
	t.Parallel()
	for _, id := range extension.Services {
		if _, ok := dependencies[id]; !ok {
			t.Errorf("a service of an extension may depend on %q, which doesn't exist", id)
		}
	}
}

func TestS239WhatIsNotUpIsNamedWithItsReason(t *testing.T) {
	t.Parallel()
	statuses := []dag.Status{
		{ID: "networkd", Up: true, State: dag.Running},
		{ID: "apid", State: dag.Waiting, Message: `Waiting for certificate to be made, service "udevd" to be "up"`, Waiting: `certificate to be made, service "udevd" to be "up"`, Since: 2 * time.Second},
		{ID: "etcd", State: dag.Waiting, Message: `Waiting for service "timed" to be "up"`, Waiting: `service "timed" to be "up"`, Reason: dag.Behind, Since: 2 * time.Second},
		{ID: "kubelet", State: dag.Failed, Message: "Failed: no image; next try in 4s", Since: 9 * time.Second},
	}
	want := `apid Waiting for 10s: Waiting for certificate to be made, service "udevd" to be "up"; kubelet Failed for 3s: no image; next try in 4s; behind them: etcd`
	if got := strings.Join(waitingFor(statuses, 12*time.Second), "; "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := waitingFor(statuses[:1], 12*time.Second); len(got) > 0 {
		t.Errorf("all are up, but it says %s", got)
	}
	down := []dag.Status{{ID: "networkd", State: dag.Stopping}, {ID: "kubelet", State: dag.Finished}, statuses[2]}
	if got := waitingFor(down, 12*time.Second); len(got) > 0 {
		t.Errorf("services stop, as they were told, but it says %s", got)
	}
}

// The console repeats what a machine waits for, less and less often, and says nothing of
// the services behind a configuration that isn't there.
func TestWaitsAreRepeatedLessOften(t *testing.T) {
	t.Parallel()
	var console bytes.Buffer
	now := time.Duration(0)
	since := func() time.Duration { return now }
	waiting := func(id string) dag.Service {
		return dag.Service{ID: id, Run: func(ctx context.Context, _ *dag.Handle) error { <-ctx.Done(); return nil }}
	}
	graph, err := dag.New(dag.Options{SinceBoot: since}, waiting(udev.ID), waiting(etcd.ID))
	if err != nil {
		t.Fatal(err)
	}
	r := reporter{graph: graph, store: resource.NewStore(), logs: logs.New(&console), since: since}
	lines := func() int { return strings.Count(console.String(), "not up yet: ") }
	for now = waitReport; now <= time.Hour; now += waitReport {
		r.waits()
	}
	if n := lines(); n < 12 || n > 20 || !strings.Contains(console.String(), etcd.ID) {
		t.Errorf("%d lines in an hour:\n%s", n, console.String())
	}
	console.Reset()
	if err := configuration.Stages.Put(r.store.As(configuration.ID), configuration.StageID, configuration.Maintenance); err != nil {
		t.Fatal(err)
	}
	r.waits()
	if text := console.String(); lines() != 1 || !strings.Contains(text, udev.ID) || strings.Contains(text, etcd.ID) {
		t.Errorf("without a configuration: %s", text)
	}
}
