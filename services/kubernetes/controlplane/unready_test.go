package controlplane

import (
	"slices"
	"strconv"
	"testing"

	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// A node accepts a configuration a moment before its controllers have it: it isn't ready in
// between, though the pods of before are.
func TestNotReadyBeforeTheConfigurationIsTakenOver(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	store := testStore(t, c)
	w := store.As("test")
	takeOver := func() {
		t.Helper()
		for _, spec := range programConfigs(&c.Cluster) {
			put(t, Configs.Put(w, spec.program(), spec))
			o, err := Configs.Get(store, spec.program())
			put(t, err)
			put(t, StaticPods.Put(w, spec.program(), kubeclient.Object{}))
			put(t, StaticPodStatuses.Put(w, kubeSystem+"/"+spec.program()+"-n1", PodStatus{
				ConfigVersion: strconv.FormatUint(o.Version, 10), "conditions": list{object{"type": "Ready", "status": "True"}},
			}))
		}
	}
	takeOver()
	if reasons := Unready(store); len(reasons) > 0 {
		t.Errorf("not ready: %q", reasons)
	}
	next := *c
	next.Cluster.Scheduler.Image = "registry.example/kube-scheduler:v1"
	c = &next
	put(t, configuration.Configs.Put(w, configuration.ConfigID, c))
	if reasons := Unready(store); !slices.Equal(reasons, []string{"static pod kube-scheduler: the node hasn't taken over its configuration yet"}) {
		t.Errorf("not ready: %q", reasons)
	}
	takeOver()
	if reasons := Unready(store); len(reasons) > 0 {
		t.Errorf("not ready: %q", reasons)
	}
}

// The static pods of a self-hosted control plane only show what the node would run.
func TestSelfHostedIsReadyWithoutStaticPods(t *testing.T) {
	t.Parallel()
	store := testStore(t, testConfig(t))
	w := store.As("test")
	put(t, StaticPods.Put(w, scheduler, kubeclient.Object{}))
	for self, want := range map[bool]int{false: 1, true: 0} {
		put(t, BootstrapStatuses.Put(w, "control-plane", BootstrapStatus{SelfHosted: self}))
		if reasons := Unready(store); len(reasons) != want {
			t.Errorf("self-hosted is %v: not ready: %q", self, reasons)
		}
	}
}
