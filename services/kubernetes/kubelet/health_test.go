package kubelet

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// answers are the API server's: for the Node n1 and the pods on it, as the kubelet n1 is told.
type answers struct {
	mu      sync.Mutex // guards all below
	silent  bool
	asks    int
	missing bool
	node    object
	pods    []any
}

func (s *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks++
	if s.silent {
		return nil, errors.New("connection refused")
	}
	code, body := http.StatusOK, any(object{})
	switch r.URL.Path {
	case "/api":
		resources := []object{
			{"resource": "nodes", "scope": "Cluster", "responseKind": object{"kind": "Node"}}, {"resource": "pods", "scope": "Namespaced", "responseKind": object{"kind": "Pod"}},
		}
		body = object{"items": []object{{"metadata": object{}, "versions": []object{{"version": "v1", "resources": resources}}}}}
	case "/api/v1/nodes/n1":
		if body = s.node; s.missing {
			code, body = http.StatusNotFound, object{"kind": "Status", "reason": "NotFound", "message": "not found"}
		}
	case "/api/v1/namespaces/kube-system/pods":
		if r.URL.Query().Get("fieldSelector") != "spec.nodeName=n1" { // the node authorizer allows no other list
			code, body = http.StatusForbidden, object{"kind": "Status", "reason": "Forbidden", "message": "can only list/watch pods with spec.nodeName field selector"}
			break
		}
		body = object{"items": s.pods}
	}
	text, err := json.Marshal(body)
	return &http.Response{StatusCode: code, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
}

func nodeIs(status, why string, heartbeat time.Time) object {
	return object{"status": object{"conditions": []object{
		{"type": "MemoryPressure", "status": "False"},
		{"type": "Ready", "status": status, "reason": "KubeletReason", "message": why, "lastHeartbeatTime": heartbeat.Format(time.RFC3339)},
	}}}
}

// podOf is a pod of a DaemonSet. waiting is why its container doesn't run; "": it runs, and is ready, since it was
// started.
func podOf(set, name, waiting string, started time.Time) object {
	ready, state := "True", object{"running": object{"startedAt": started.Format(time.RFC3339)}}
	if waiting != "" {
		ready, state = "False", object{"waiting": object{"reason": waiting}}
	}
	return object{
		"metadata": object{"name": name, "namespace": "kube-system", "ownerReferences": []object{{"kind": "DaemonSet", "name": set}}},
		"status": object{
			"phase": "Running", "conditions": []object{{"type": "Ready", "status": ready}},
			"initContainerStatuses": []object{{"state": object{"terminated": object{"reason": "Completed"}}}},
			"containerStatuses":     []object{{"name": set, "state": state}},
		},
	}
}

// health runs the controller of a node.
func health(t *testing.T, s *answers, cfg *config.Config) *resource.Store {
	t.Helper()
	store, file := resource.NewStore(), filepath.Join(t.TempDir(), "client.pem")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, configuration.Configs.Put(store.As("test"), configuration.ConfigID, cfg))
	must(t, network.Hostnames.Put(store.As("test"), network.HostnameID, "n1"))
	booted := time.Now()
	controller := HealthController(nil)
	controller.Reconcile = (&healthController{clientFile: file, transport: s, sinceBoot: func() time.Duration { return time.Since(booted) }}).reconcile
	runtime, err := resource.NewRuntime(store, slog.New(slog.DiscardHandler), controller)
	must(t, err)
	go func() { _ = runtime.Run(t.Context()) }()
	return store
}

// A node is healthy when its Node is Ready, and its own system pods on it are; what is from before the boot doesn't
// count.
func TestHealthIsThatKubernetesServes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		s := &answers{silent: true}
		cfg := &config.Config{}
		cfg.Machine.Type, cfg.Cluster.Network.CNI.Name = config.ControlPlane, config.CNIFlannel
		store := health(t, s, cfg)
		at := func(d time.Duration) time.Time { return began.Add(d) }
		flannel := func(waiting string, started time.Time) object {
			return podOf("kube-flannel", "kube-flannel-x", waiting, started)
		}
		proxy := func(waiting string, started time.Time) object {
			return podOf("kube-proxy", "kube-proxy-y", waiting, started)
		}
		is := func(what, serves, why string) {
			t.Helper()
			time.Sleep(healthLater + healthSoon)
			synctest.Wait()
			if h := Health(store); h.Serves != serves || h.Faults.String() != why {
				t.Errorf("%s: %s, %q, want %s, %q", what, h.Serves, h.Faults, serves, why)
			}
		}
		change := func(do func()) {
			s.mu.Lock()
			defer s.mu.Unlock()
			do()
		}
		synctest.Wait()
		if h := Health(store); h.Serves != Unknown || !strings.Contains(h.Faults.String(), "connection refused") || len(h.Faults) != 4 {
			t.Errorf("no API server: %+v", h)
		}
		change(func() { s.silent, s.missing = false, true })
		is("before it is registered", "no", "Kubernetes has no Node n1")
		change(func() {
			s.missing, s.node, s.pods = false, nodeIs("True", "ok", at(-time.Minute)), []any{flannel("", at(-time.Hour)), proxy("", at(-time.Hour))}
		})
		is("of the former boot", "no", "Node: its kubelet hasn't reported since the boot; pod kube-system/kube-flannel-x: FormerBoot; pod kube-system/kube-proxy-y: FormerBoot")
		change(func() { s.node = nodeIs("True", "ok", at(3*time.Second)) })
		is("the kubelet reports", "no", "pod kube-system/kube-flannel-x: FormerBoot; pod kube-system/kube-proxy-y: FormerBoot")
		change(func() { s.pods = []any{flannel("", at(4*time.Second)), proxy("ImagePullBackOff", at(0))} })
		is("one doesn't run", "no", "pod kube-system/kube-proxy-y: ImagePullBackOff")
		change(func() {
			ending := proxy("", at(5*time.Second))
			ending["metadata"].(object)["deletionTimestamp"] = "2026-01-01T00:00:00Z"
			s.pods = []any{flannel("", at(4*time.Second)), ending, podOf("mine", "mine-z", "CrashLoopBackOff", at(0))}
		})
		is("one ends", "no", "no pod of kube-system/kube-proxy is on this node")
		change(func() {
			s.pods = []any{flannel("", at(4*time.Second)), podOf("kube-proxy", "kube-proxy-z", "", at(6*time.Second)), podOf("mine", "mine-z", "CrashLoopBackOff", at(0))}
		})
		is("another one runs", "yes", "")
		change(func() { s.asks = 0 })
		time.Sleep(10 * time.Minute)
		change(func() {
			if s.asks > 2*61 {
				t.Errorf("a healthy node asks %d times in 10 minutes", s.asks)
			}
		})
		change(func() { s.node = nodeIs("False", "container runtime network not ready", at(time.Minute)) })
		is("NotReady", "no", "Node is NotReady: container runtime network not ready")
		change(func() { s.node = nodeIs("Unknown", "Kubelet stopped posting node status.", at(time.Minute)) })
		is("Unknown", "no", "Node is Unknown: Kubelet stopped posting node status.")
		long := strings.Repeat("x", 1<<14)
		change(func() { s.node, s.pods[0] = nodeIs("False", long, at(time.Minute)), flannel(long, at(0)) })
		time.Sleep(time.Minute)
		for _, f := range Health(store).Faults {
			if len(f.Text) > maxFault+100 || len(f.Code) > maxFault+10 {
				t.Errorf("a text of %d bytes, a code of %d", len(f.Text), len(f.Code))
			}
		}
		change(func() { s.node, s.pods[0] = nodeIs("True", "", at(time.Minute)), flannel("", at(time.Minute)) })
		is("Ready", "yes", "")
		change(func() { s.silent = true })
		is("an API server restarts", "yes", "")
		time.Sleep(silence)
		if h := Health(store); h.Serves != Unknown {
			t.Errorf("none answers for long: %+v", h)
		}
		change(func() { s.asks = 0 })
		time.Sleep(10 * time.Minute)
		change(func() {
			if s.asks > 2*61 {
				t.Errorf("a silent API server is asked %d times in 10 minutes", s.asks)
			}
		})
		change(func() { s.silent = false })
		is("it answers again", "yes", "")
	})
}

// A worker doesn't know from its configuration which of the pods its cluster has.
func TestWorkerNeedsNoPodThatIsNotThere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, typ := range []config.MachineType{config.Worker, config.ControlPlane} {
			cfg := &config.Config{}
			cfg.Machine.Type = typ
			store := health(t, &answers{node: nodeIs("True", "", time.Now())}, cfg)
			synctest.Wait()
			if got, want := Health(store).Faults.String(), map[bool]string{true: "no pod of kube-system/kube-proxy is on this node"}[typ.ControlPlane()]; got != want {
				t.Errorf("%s: %q, want %q", typ, got, want)
			}
		}
	})
}
