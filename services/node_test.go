package services

import (
	"io"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
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

func TestS239WhatIsNotUpIsNamedWithItsReason(t *testing.T) {
	t.Parallel()
	statuses := []dag.Status{
		{ID: "networkd", Up: true, State: dag.Running},
		{ID: "apid", State: dag.Waiting, Message: `Waiting for certificate to be made, service "udevd" to be "up"`, Waiting: `certificate to be made, service "udevd" to be "up"`, Since: 2 * time.Second},
		{ID: "etcd", State: dag.Waiting, Message: `Waiting for service "timed" to be "up"`, Waiting: `service "timed" to be "up"`, Reason: dag.Behind, Since: 2 * time.Second},
		{ID: "kubelet", State: dag.Failed, Message: "Failed: no image; next try in 4s", Since: 9 * time.Second},
	}
	want := `apid Waiting for 10s: Waiting for certificate to be made, service "udevd" to be "up"; kubelet Failed for 3s: no image; next try in 4s; behind them: etcd`
	if got := waitingFor(statuses, 12*time.Second); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := waitingFor(statuses[:1], 12*time.Second); got != "" {
		t.Errorf("all are up, but it says %s", got)
	}
}
