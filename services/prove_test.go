package services

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/slots"
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
	put(configuration.Configs.Put(own, configuration.ConfigID, &cfg))
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

	o := &onTrial{all: boot.Slots{A: boot.Slot{State: boot.SlotGood}, B: boot.Slot{State: boot.SlotTrying, Excused: []string{"timed"}}, Choice: "A"}}
	if _, got := n.unproven(o); slices.Contains(got, "timed") || !slices.Contains(got, "kubelet") {
		t.Errorf("with a system to go back to: %q", got)
	}
	proves := func(what string, want ...string) {
		t.Helper()
		_, got := n.unproven(o)
		got = slices.DeleteFunc(got, func(text string) bool {
			return !strings.HasPrefix(text, "Node") && !strings.HasPrefix(text, "pod ") && !strings.HasPrefix(text, "no API server")
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	proves("an earlier release has chosen the system")
	o.all.B.Kubernetes = true
	proves("Kubernetes wasn't asked", "no API server says how this node is: none was asked yet")
	sees := func(h kubelet.NodeHealth) { put(kubelet.NodeHealths.Put(own, kubelet.HealthID, h)) }
	sees(kubelet.NodeHealth{Faults: []kubelet.Fault{{Object: "Node", Text: "Node is NotReady: no network"}, {Object: "kube-proxy", Text: "pod x: CrashLoopBackOff"}}})
	proves("it isn't Ready", "Node is NotReady: no network", "pod x: CrashLoopBackOff")
	if got := n.unhealthy(); !slices.Contains(got, "Node") || !slices.Contains(got, "kube-proxy") {
		t.Errorf("an upgrade would excuse %q", got)
	}
	o.all.B.Excused = []string{"timed", "kube-proxy"}
	proves("a pod that didn't run before", "Node is NotReady: no network")
	sees(kubelet.NodeHealth{})
	proves("it serves")
	o.all.A.State = boot.SlotEmpty
	if _, got := n.unproven(o); slices.Contains(got, "kubelet") || !slices.Contains(got, "apid") {
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

// onTrial are the slots of a machine whose new system runs in slot B.
type onTrial struct {
	all       boot.Slots
	noDisk    bool
	healthy   func() bool   // whether all that isn't up is excused; nil: what is in all
	failure   error         // of Fail
	stuck     time.Duration // how long each request takes
	broken    int           // how often Prove fails, after META has the state
	publish   func(boot.SlotState)
	did, node []string // what was done with the slots, and with the machine
}

func (*onTrial) Running() string  { return "B" }
func (o *onTrial) Fallback() bool { return o.all.A.State == boot.SlotGood }

func (o *onTrial) Get() (boot.Slots, error) {
	if o.stuck > 0 {
		time.Sleep(o.stuck)
	}
	if o.noDisk {
		return boot.Slots{}, disks.ErrNoSystem
	}
	if o.healthy == nil {
		return o.all, nil
	}
	o.all.B.Excused = nil
	if o.healthy() {
		o.all.B.Excused = slices.Concat(slices.Collect(maps.Keys(dependencies)), []string{"static pods"})
	}
	return o.all, nil
}

func (o *onTrial) Prove(_ context.Context, reason string) error {
	o.all.B.State = boot.SlotGood
	o.publish(boot.SlotGood)
	if o.broken > 0 {
		o.broken--
		return errors.New("the EFI system partition can't be written")
	}
	o.did = append(o.did, "good: "+reason)
	return nil
}

func (o *onTrial) Fail(_ context.Context, reason string) error {
	if o.failure == nil {
		o.did = append(o.did, "bad: "+reason)
	}
	return o.failure
}

// A new system is good after it was healthy for a while. One that isn't in time goes, unless there is no other, and so
// does one without a disk.
func TestProve(t *testing.T) {
	t.Parallel()
	good := boot.Slot{State: boot.SlotGood}
	for name, c := range map[string]struct {
		noDisk    bool
		stuck     time.Duration // a request to the disk
		wiped     bool
		broken    int
		former    boot.Slot
		failure   error
		healthy   func(after time.Duration) bool
		did, node string
		took      time.Duration
	}{
		"healthy":                 {former: good, healthy: func(time.Duration) bool { return true }, did: "good: healthy 5s after its boot", took: 5 * time.Second},
		"healthy with a break":    {former: good, healthy: func(after time.Duration) bool { return after != 3*time.Second }, did: "good: healthy 8s after its boot", took: 8 * time.Second},
		"boot loader fails twice": {broken: 2, former: good, healthy: func(time.Duration) bool { return true }, did: "good: healthy 7s after its boot", took: 7 * time.Second},
		"boot loader fails, and then the node isn't healthy": {broken: 1, healthy: func(after time.Duration) bool { return after <= 5*time.Second },
			did: "good: healthy 6s after its boot", took: 6 * time.Second},
		"boot loader always fails": {broken: 1e6, former: good, healthy: func(time.Duration) bool { return true }, took: time.Hour},
		"never healthy": {former: good, healthy: func(time.Duration) bool { return false },
			did: "bad: not healthy within 10m0s: ", node: "the system on trial goes: not healthy within 10m0s: ", took: 10*time.Minute + time.Second},
		"never healthy, without the data of before": {wiped: true, former: good, healthy: func(time.Duration) bool { return false },
			did: "bad: not healthy within 30m0s: ", node: "the system on trial goes: not healthy within 30m0s: ", took: 30*time.Minute + time.Second},
		"never healthy, and alone": {failure: errors.New("there is no good one"), healthy: func(time.Duration) bool { return false }, took: time.Hour},
		"never healthy, and nothing can be written": {failure: errors.New("mount /efi: no such device"), former: good, healthy: func(time.Duration) bool { return false },
			node: "the system on trial goes: not healthy within 10m0s: ", took: 10*time.Minute + time.Second},
		"no disk": {noDisk: true, failure: disks.ErrNoSystem, former: good, healthy: func(time.Duration) bool { return false },
			node: "the system on trial goes: not healthy within 10m0s: " + disks.ErrNoSystem.Error(), took: 10*time.Minute + time.Second},
		"the disk doesn't answer": {stuck: time.Hour, failure: errors.New("no answer"), former: good, healthy: func(time.Duration) bool { return false },
			node: "the system on trial goes: it is neither good nor bad after 35m0s, because its disk doesn't answer", took: time.Hour + time.Second},
		"no disk, and alone": {noDisk: true, failure: disks.ErrNoSystem, healthy: func(time.Duration) bool { return false }, took: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := &onTrial{all: boot.Slots{A: c.former, B: boot.Slot{State: boot.SlotTrying, Wiped: c.wiped}, Choice: "A"}, failure: c.failure, broken: c.broken, noDisk: c.noDisk, stuck: c.stuck}
				var mu sync.Mutex // guards o.node
				n, err := NewNode(Options{
					Mode: boot.Machine, Processes: process.New(), Logs: logs.New(io.Discard),
					Power: func(p boot.Power, why string) {
						mu.Lock()
						defer mu.Unlock()
						o.node = append(o.node, why)
					},
				})
				if err != nil {
					t.Fatal(err)
				}
				o.publish = func(state boot.SlotState) {
					if err := slots.Statuses.Put(n.Store.As(slots.ID), "B", slots.Status{State: state}); err != nil {
						t.Error(err)
					}
				}
				if !c.noDisk {
					o.publish(boot.SlotTrying)
				}
				began := time.Now()
				o.healthy = func() bool { return c.healthy(time.Since(began)) }
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				n.prove(ctx, o)
				if took := time.Since(began); took != c.took {
					t.Errorf("it took %s, want %s", took, c.took)
				}
				mu.Lock()
				defer mu.Unlock()
				did, node := strings.Join(o.did, ", "), strings.Join(o.node, ", ")
				if !strings.HasPrefix(did, c.did) || (did == "") != (c.did == "") || !strings.HasPrefix(node, c.node) || (node == "") != (c.node == "") {
					t.Errorf("slots: %q, machine: %q, want %q, %q", did, node, c.did, c.node)
				}
				if c.did != "" && c.node != "" && !strings.Contains(node, "kubelet") {
					t.Errorf("it isn't said what isn't healthy: %q", node)
				}
			})
		})
	}
}
