package services

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/machine"
)

// What a new system must have up again is each static pod by its name, and on a control plane any at all.
func TestUnhealthyStaticPods(t *testing.T) {
	t.Parallel()
	n, err := NewNode(Options{Mode: boot.Machine, Cmdline: boot.ParseCmdline("garboard.slot=B"), Processes: process.New(), Logs: logs.New(io.Discard)})
	if err != nil {
		t.Fatal(err)
	}
	put := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pods := func() string {
		return strings.Join(slices.DeleteFunc(n.unhealthy(), func(name string) bool { return !strings.HasPrefix(name, "static pod") }), ", ")
	}
	own := n.Store.As("test")
	var cfg config.Config
	cfg.Machine.Type = config.ControlPlane
	put(machine.Configs.Put(own, machine.ConfigID, &cfg))
	if got := pods(); got != "static pods" {
		t.Errorf("before they are made: %q", got)
	}
	put(controlplane.BootstrapStatuses.Put(own, "control-plane", controlplane.BootstrapStatus{SelfHosted: true}))
	if got := pods(); got != "" {
		t.Errorf("self-hosted: %q", got)
	}
	put(controlplane.BootstrapStatuses.Put(own, "control-plane", controlplane.BootstrapStatus{}))
	for _, name := range []string{"kube-apiserver", "kube-scheduler"} {
		put(controlplane.StaticPods.Put(own, name, kubeclient.Object{}))
	}
	ready := controlplane.PodStatus{"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}, controlplane.ConfigVersion: "0"}
	put(controlplane.StaticPodStatuses.Put(own, "kube-system/kube-apiserver-n1", ready))
	if got := pods(); got != "static pod kube-scheduler" {
		t.Errorf("one is ready: %q", got)
	}
	put(controlplane.StaticPodStatuses.Put(own, "kube-system/kube-scheduler-n1", ready))
	if got := pods(); got != "" {
		t.Errorf("all are ready: %q", got)
	}

	slots := boot.Slots{A: boot.Slot{State: boot.SlotGood}, B: boot.Slot{State: boot.SlotTrying, Excused: []string{"timed"}}, Choice: "A"}
	if got := n.unproven(slots); slices.Contains(got, "timed") || !slices.Contains(got, "kubelet") {
		t.Errorf("with a system to go back to: %q", got)
	}
	slots.A.State = boot.SlotEmpty
	if got := n.unproven(slots); slices.Contains(got, "kubelet") || !slices.Contains(got, "apid") {
		t.Errorf("without a system to go back to: %q", got)
	}
}

// A machine may lack what the service of an extension waits for: a new system is good without it.
func TestExtensionsProveNothing(t *testing.T) {
	t.Parallel()
	got := own([]dag.Status{{ID: "kubelet"}, {ID: "ext-guest-agent"}, {ID: "etcd"}})
	if len(got) != 2 || got[0].ID != "kubelet" || got[1].ID != "etcd" {
		t.Errorf("%v", got)
	}
}
