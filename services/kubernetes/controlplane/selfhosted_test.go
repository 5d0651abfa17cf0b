package controlplane

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// S-298, S-301: while the control plane is self-hosted, static pods are rendered for the
// operator to see, and nothing is written for the kubelet. What an earlier boot has left
// goes. When the mark in etcd is removed, the files are written.
func TestSelfHostedControlPlaneHasNoFiles(t *testing.T) {
	c := testConfig(t)
	old, err := net.Listen("tcp", "127.0.0.1:0") // the self-hosted kube-apiserver
	put(t, err)
	defer old.Close()
	c.Cluster.ControlPlane.LocalAPIServerPort = old.Addr().(*net.TCPAddr).Port
	f := newFixture(t, c)
	f.selfHosted.Store(true)
	put(t, os.MkdirAll(f.path("static-pods"), 0o755))
	put(t, os.WriteFile(f.file(scheduler), nil, 0o600))
	f.run()
	f.etcd(true)
	eventually.That(t, patience, "it is self-hosted, and pods are rendered", func() error {
		o, err := BootstrapStatuses.Get(f.store, "control-plane")
		if err == nil && !o.Spec.SelfHosted {
			t.Fatal("it isn't self-hosted")
		}
		if n := len(StaticPods.List(f.store)); err == nil && n != len(Programs) {
			err = fmt.Errorf("%d static pods", n)
		}
		return err
	})
	eventually.That(t, patience, "what an earlier boot has left is gone", func() error {
		if left, err := os.ReadDir(f.path("static-pods")); err != nil || len(left) > 0 {
			return fmt.Errorf("%v, %v", left, err)
		}
		return nil
	})
	own := f.path("static-pods", "own.json")
	left := f.path("static-pods", "kube-system-kube-apiserver-x.json")
	put(t, os.WriteFile(own, []byte("{}"), 0o600))
	put(t, os.WriteFile(left, []byte(`{"metadata":{"annotations":{"`+CheckpointOf+`":"kube-apiserver-x"}}}`), 0o600))
	put(t, os.MkdirAll(f.path("checkpoints", "manifests"), 0o700))
	deleted := "" // since when the pods are being deleted
	runs := func(programs ...string) {
		var items list
		for _, program := range programs {
			meta := object{
				"name": program + "-x7k2p", "namespace": kubeSystem, "labels": object{"k8s-app": program},
				"ownerReferences": list{object{"kind": "DaemonSet", "name": program, "controller": true}},
			}
			if deleted != "" {
				meta["deletionTimestamp"] = deleted
			}
			items = append(items, object{"metadata": meta})
		}
		text, err := json.Marshal(object{"kind": "PodList", "items": items})
		put(t, err)
		f.kubelet.answer(http.StatusOK, string(text))
	}
	runs(controllerManager)
	f.selfHosted.Store(false)
	written := func(programs ...string) func() error {
		return func() error {
			for _, program := range programs {
				if _, err := os.Stat(f.file(program)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	// S-304: it isn't written while the self-hosted one has its port.
	eventually.That(t, patience, "the file of the scheduler is written", written(scheduler))
	if written(apiServer)() == nil || written(controllerManager)() == nil {
		t.Error("a static pod was written while its port wasn't free, or its predecessor was there")
	}
	// Without an API server the kubelet doesn't say what it runs.
	f.kubelet.answer(http.StatusInternalServerError, "Authorization error")
	for _, path := range []string{left, f.path("checkpoints")} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	if _, err := os.Stat(own); err != nil {
		t.Error(err)
	}
	put(t, old.Close())
	eventually.That(t, patience, "the file of kube-apiserver is written", written(apiServer))
	if written(controllerManager)() == nil {
		t.Error("the static pod of kube-controller-manager was written, and its predecessor may be there")
	}
	deleted = "2026-01-01T00:00:00Z"
	runs(controllerManager)
	eventually.That(t, patience, "the file of kube-controller-manager is written", written(controllerManager))
}
