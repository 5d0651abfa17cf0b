package controlplane

import (
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// The kubelet forgets the status of a static pod for a minute when it replaces the pod's
// object: the status of before is kept, and the program itself is asked.
func TestStaticPodStatusThatTheKubeletForgets(t *testing.T) {
	healthy := atomic.Bool{}
	program := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" || !healthy.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer program.Close()
	pod := func(version, ready string, containers int) kubeclient.Object {
		status := object{"phase": "Pending"}
		if containers > 0 {
			status = object{"conditions": list{object{"type": "Ready", "status": ready}}, "containerStatuses": list{object{"restartCount": 0}}}
		}
		return kubeclient.Object{
			"metadata": object{"name": "kube-apiserver-n1", "uid": "of-" + version, "namespace": kubeSystem, "labels": object{"k8s-app": apiServer}, "annotations": object{"kubernetes.io/config.source": "file", configVersionAnnotation: version}},
			"spec":     object{"containers": list{object{"readinessProbe": object{"httpGet": object{"port": program.Listener.Addr().(*net.TCPAddr).Port, "path": "/readyz"}}}}},
			"status":   status,
		}
	}
	v := view{testStore(t, testConfig(t)).As("test"), testLog(t)}
	for _, tc := range []struct {
		what    string
		pod     kubeclient.Object
		healthy bool
		ready   bool
	}{
		{"it starts", pod("1", "False", 1), false, false},
		{"forgotten, and not ready yet", pod("1", "", 0), false, false},
		{"forgotten, and ready", pod("1", "", 0), true, true},
		{"known again", pod("1", "True", 1), false, true},
		{"forgotten when it was ready", pod("1", "", 0), false, true},
		{"of another configuration, and not started", pod("2", "", 0), true, false},
	} {
		healthy.Store(tc.healthy)
		_, _, err := publishStatuses(t.Context(), v, kubeclient.Object{"items": list{object(tc.pod)}}, nil)
		put(t, err)
		o, err := StaticPodStatuses.Get(v, kubeSystem+"/kube-apiserver-n1")
		put(t, err)
		if o.Spec.Ready() != tc.ready {
			t.Errorf("%s: ready is %v: %v", tc.what, o.Spec.Ready(), o.Spec)
		}
	}
}
