package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

func notReady(w http.ResponseWriter) {
	w.WriteHeader(http.StatusInternalServerError)
	fmt.Fprint(w, "[+]ping ok\n[+]log ok\n[-]etcd failed: reason withheld\n[+]informer-sync ok\nreadyz check failed\n")
}

// withoutEtcd is a control plane whose etcd never was up.
func withoutEtcd(n *node, services map[string]*dag.Service) {
	n.must(etcd.Statuses.Put(n.store.As("etcd"), etcd.StatusID, etcd.StatusSpec{Endpoint: n.etcd.client}))
	n.etcd.ready.set(http.StatusServiceUnavailable, "[-]linearizable_read failed: etcdserver: leader changed\n")
	n.api.fail("/readyz", notReady)
	if services["etcd"].Health == nil {
		services["etcd"].Health = unhealthy(`Get "http://127.0.0.1:2381/readyz": dial tcp 127.0.0.1:2381: connect: connection refused`)
	}
}

// S-356, guide: kubelet is not running on control plane node.
func TestS356KubeletNotRunning(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.config.Machine.Kubelet.ExtraArgs = config.Args{"nope": {"1"}}
		services["kubelet"].Run = n.ends("kubelet", "kubelet-unknown-flag.log")
		services["kubelet"].Health = unhealthy("connection refused")
	})
	n.finds("kubelet-not-running", failure, `machine.kubelet.extraArgs has nope: "1"`, "container kubelet ended with status 1", "unknown flag: --nope", "edit mc")

	n = start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		n.config.Machine.Kubelet.ExtraArgs = config.Args{"max-pods": {"abc"}}
		services["kubelet"].Run = n.ends("kubelet", "kubelet-bad-value.log")
	})
	n.finds("kubelet-not-running", failure, `machine.kubelet.extraArgs has max-pods: "abc"`, "invalid argument")

	n = start(t, config.Worker, func(_ *node, services map[string]*dag.Service) {
		services["kubelet"].Health = unhealthy(`Get "http://127.0.0.1:10248/healthz": dial tcp 127.0.0.1:10248: connect: connection refused`)
	})
	n.finds("kubelet-not-running", info, "10248")
	n.later(startTime)
	n.finds("kubelet-not-running", failure, "runs and is not healthy", "10248")
}

// S-282.
func TestS282SecretsMissing(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.config.Cluster.AggregatorCA = config.CertKey{}
	})
	n.finds("secrets-missing", failure, "cluster.aggregatorCA", "missing cluster.aggregatorCA secret")
	n.finds("static-pods-not-generated", info, "Follows from secrets-missing")
}

// Guide: Kubernetes static pod definitions are not generated.
func TestStaticPodsNotGenerated(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	// A file in place of the directory, so that nothing is written again: tried until the
	// controller, which goes on meanwhile, doesn't make the directory in between.
	eventually.That(t, patience, "the directory to be replaced", func() error {
		return errors.Join(os.RemoveAll(n.path(boot.StaticPodsDir)), os.WriteFile(n.path(boot.StaticPodsDir), nil, 0o600))
	})
	n.finds("static-pods-not-generated", failure, "garboard-kube-scheduler.yaml", "garboard-kube-apiserver.yaml", "StaticPods: 3")
}

// Guide: if kube-apiserver shows as CONTAINER_EXITED.
func TestAPIServerNotRunning(t *testing.T) {
	t.Parallel()
	const log = "var/log/pods/kube-system_kube-apiserver-n1_0123/kube-apiserver/"
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.config.Cluster.APIServer.ExtraArgs = config.Args{"nope": {"1"}}
		n.kubelet.set(200, podList(staticPod(apiServer, crashed), staticPod(controllerManager, running), staticPod(scheduler, running)))
		data, err := os.ReadFile("testdata/apiserver-unknown-flag.log")
		n.must(err)
		var cri strings.Builder
		for line := range strings.Lines(string(data)) {
			cri.WriteString("2026-11-21T15:00:00.123456789Z stderr F " + line)
		}
		n.write("2026-11-21T15:00:00.123456789Z stderr F older\n", log, "3.log")
		n.must(os.Chtimes(n.path(log, "3.log"), time.Unix(1, 0), time.Unix(1, 0)))
		n.write(cri.String(), log, "4.log")
		n.write("", log, "5.log") // it has just been started once more
	})
	n.api.fail("/readyz", func(http.ResponseWriter) { panic(http.ErrAbortHandler) })
	n.finds("apiserver-not-running", failure, `cluster.apiServer.extraArgs has nope: "1"`, "Error: unknown flag: --nope", "CrashLoopBackOff", "exit code 1", "EOF")
	n.finds("endpoint-not-answering", info, "Follows from apiserver-not-running")

	// Without an API server the kubelet authorizes nobody: its last answer, that the former
	// container runs, stays.
	n.kubelet.set(200, podList(staticPod(apiServer, running)))
	n.sees(apiServer, "running")
	n.kubelet.set(http.StatusUnauthorized, "")
	n.finds("apiserver-not-running", failure, `cluster.apiServer.extraArgs has nope: "1"`, "Error: unknown flag: --nope", "EOF")
}

// sees waits until the node has that state of a program's container from its kubelet.
func (n *node) sees(program, state string) {
	n.t.Helper()
	eventually.That(n.t, patience, program+" to be "+state, func() error {
		for _, o := range controlplane.StaticPodStatuses.List(n.store) {
			for _, c := range containers(kubeclient.Object{"status": map[string]any(o.Spec)}) {
				if c.Text("name") == program && c.At("state", state) != nil {
					return nil
				}
			}
		}
		return errors.New("it isn't")
	})
}

// S-350: normal while a cluster starts.
func TestS350ErrorOnTheServer(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.age.Store(int64(time.Minute))
	n.api.fail("/readyz", notReady)
	f := n.finds("apiserver-not-running", info, `an error on the server ("[-]etcd failed: reason withheld") has prevented the request from succeeding`, "It should pass by itself before ")
	if strings.Contains(f.Why, "Follows") {
		t.Errorf("it has no cause: %s", f.Why)
	}
	n.later(time.Hour)
	n.finds("apiserver-not-running", failure, "an error on the server")
	n.api.fail("/readyz", nil)
	n.healthy()
}

// Guide: Checking kube-controller-manager and kube-scheduler.
func TestOtherProgramsNotRunning(t *testing.T) {
	t.Parallel()
	for program, id := range map[string]string{controllerManager: "controller-manager-not-running", scheduler: "scheduler-not-running"} {
		n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
			n.write("2026-11-21T15:00:00Z stderr F E1121 15:22:19.683508   18931 run.go:72] \"command failed\" err=\"invalid configuration\"\n",
				"var/log/pods/kube-system_"+program+"-n1_0123", program, "0.log")
			states := map[string]string{controllerManager: running, scheduler: running}
			states[program] = crashed
			n.kubelet.set(200, podList(staticPod(apiServer, running), staticPod(controllerManager, states[controllerManager]), staticPod(scheduler, states[scheduler])))
		})
		n.others[program].set(0, "")
		n.finds(id, failure, program, "EOF", `It ends, and says: E1121 15:22:19.683508   18931 run.go:72] "command failed" err="invalid configuration"`,
			"gbctl logs -k kube-system/"+program+"-n1:"+program)
		n.others[program].set(http.StatusOK, "ok")
		n.healthy()
	}
}

// The cause is in the program's own words also when the kubelet alone has them, or the runtime didn't
// start it.
func TestProgramsLastWords(t *testing.T) {
	t.Parallel()
	for state, why := range map[string]string{
		`"lastState":{"terminated":{"exitCode":1,"reason":"Error","message":"I1 starting\nE1121 15:22:19.683508 1 run.go:72] \"command failed\" err=\"authentication-config file and oidc-* flags are mutually exclusive\"\n"}}`: "authentication-config file and oidc-* flags are mutually exclusive",
		`"state":{"waiting":{"reason":"CreateContainerError","message":"failed to apply apparmor profile"}}`:                                                                                                                     "failed to apply apparmor profile",
	} {
		n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
			n.kubelet.set(200, podList(staticPod(apiServer, `{"name":"%[1]s","ready":false,`+state+`}`), staticPod(controllerManager, running), staticPod(scheduler, running)))
		})
		n.api.fail("/readyz", func(http.ResponseWriter) { panic(http.ErrAbortHandler) })
		if f := n.finds("apiserver-not-running", failure, "gbctl logs -k kube-system/kube-apiserver-n1:kube-apiserver"); !strings.HasPrefix(f.Why, "It ends, and says: ") || !strings.Contains(f.Why, why) {
			t.Errorf("%s: %s", state, f.Why)
		}
	}
}

func TestControllerFailing(t *testing.T) {
	t.Parallel()
	gone := httptest.NewServer(http.NotFoundHandler())
	defer gone.Close()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		u, err := config.ParseURL(gone.URL + "/calico.yaml")
		n.must(err)
		n.config.Cluster.ExtraManifests = []config.URL{u}
	})
	n.finds("controller-failing", warning, "k8s.ManifestController", "/calico.yaml", "404", "cluster.extraManifests")
}

// Guide: bootstrap manifests.
func TestManifestsNotApplied(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) { n.api.lose("coredns") })
	n.finds("manifests-not-applied", failure, "11-core-dns", "/v1/ServiceAccount/coredns", manifestApplier, "etcd session")
	n.lacks("controller-failing")
}

// A webhook without pods that fails closed is named, with the command that ends it; others are not.
func TestWebhookWithoutPods(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	hook := func(kind, name, policy, service string) {
		w := map[string]any{"name": name + ".example.org", "clientConfig": map[string]any{"service": map[string]any{"namespace": "policy-system", "name": service}}}
		if policy != "" {
			w["failurePolicy"] = policy
		}
		n.api.put(kubeclient.Object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": map[string]any{"name": name}, "webhooks": []any{w}})
	}
	hook("ValidatingWebhookConfiguration", "policy", "Fail", "policy")
	hook("MutatingWebhookConfiguration", "sidecars", "", "sidecars") // Fail is the default
	hook("MutatingWebhookConfiguration", "lenient", "Ignore", "lenient")
	n.finds("webhook-without-pods", failure, "policy.example.org of ValidatingWebhookConfiguration policy", "policy-system/policy", "kubectl -n policy-system", "kubectl delete validatingwebhookconfiguration policy")
	n.finds("webhook-without-pods", failure, "sidecars.example.org of MutatingWebhookConfiguration sidecars", "kubectl delete mutatingwebhookconfiguration sidecars")
	for _, f := range n.diagnose() {
		if f.Id == "webhook-without-pods" && strings.Contains(f.What, "lenient") {
			t.Errorf("one that refuses nothing: %s", show(f))
		}
	}
	n.api.put(kubeclient.Object{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": map[string]any{"name": "a"},
		"endpoints": []any{map[string]any{"conditions": map[string]any{"ready": true}}}})
	n.lacks("webhook-without-pods")
	url := func(url string) {
		n.api.put(kubeclient.Object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": map[string]any{"name": "outside"},
			"webhooks": []any{map[string]any{"name": "outside.example.org", "clientConfig": map[string]any{"url": url}}}})
	}
	url(fmt.Sprintf("https://127.0.0.2:%d/validate", freeport.Find(t).Port()))
	n.finds("webhook-without-pods", failure, "outside.example.org", "/validate: ", "connection refused", "kubectl delete validatingwebhookconfiguration outside")
	url(n.others[scheduler].url)
	n.lacks("webhook-without-pods")
}

// After a boot the pods of a Service start by themselves; a Service that doesn't exist doesn't come.
func TestWebhookAfterTheBoot(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) { n.age.Store(int64(time.Minute)) })
	n.api.lose("none")
	for _, name := range []string{"none", "policy"} {
		n.api.put(kubeclient.Object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": map[string]any{"name": name}, "webhooks": []any{
			map[string]any{"name": name + ".example.org", "clientConfig": map[string]any{"service": map[string]any{"namespace": "policy-system", "name": name}}}}})
	}
	n.finds("webhook-without-pods", failure, "Service policy-system/none doesn't exist")
	n.finds("webhook-without-pods", info, "Service policy-system/policy has no ready pod", "It should pass by itself before ")
}

func TestAPIServiceWithoutPods(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.api.put(kubeclient.Object{"kind": "APIService", "metadata": map[string]any{"name": "v1."}, "spec": map[string]any{}})
	n.healthy()
	n.api.put(kubeclient.Object{"kind": "APIService", "metadata": map[string]any{"name": "v1beta1.metrics.k8s.io"}, "spec": map[string]any{"service": map[string]any{"namespace": "kube-system", "name": "metrics-server"}}})
	n.finds("apiservice-without-pods", warning, "v1beta1.metrics.k8s.io", "kube-system/metrics-server has no ready pod", "kubectl delete apiservice v1beta1.metrics.k8s.io")
}

// A manifest of the configuration that can't be read, or whose objects can't be made, is named, and why.
func TestManifestIncomplete(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.config.Cluster.InlineManifests = []config.InlineManifest{{Name: "mine", Contents: "apiVersion: v1\nkind: ConfigMap\nkind: Secret\n"}}
	})
	n.finds("manifest-incomplete", info, `Manifest 20-mine isn't made, or not all of it: line 3: not valid YAML: key "kind" already set in map`, "cluster.inlineManifests", "gbctl get manifests")
	n.lacks("problem-stays") // it isn't found twice
}

// S-351, guide: Talos prints error nodes "…" not found.
func TestS351NodeNotRegistered(t *testing.T) {
	t.Parallel()
	csr := kubeclient.Object{"kind": csrKind, "metadata": map[string]any{"name": "csr-jcn9j"},
		"spec": map[string]any{"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "username": "system:bootstrap:q9pyzr"}}
	n := start(t, config.Init)
	n.api.remove("Node", nodeName)
	n.must(os.Remove(n.path(clientFile)))
	n.finds("node-not-registered", failure, `nodes "n1" not found`, "hasn't requested one", clientFile+": none")
	n.api.put(csr)
	n.finds("node-not-registered", failure, "csr-jcn9j", "system:bootstrap:q9pyzr", "Pending", "kubectl certificate approve")
	// While the controller manager doesn't run, that is what there is to repair.
	n.others[controllerManager].set(http.StatusInternalServerError, "[-]leaderElection failed")
	n.finds("node-not-registered", info, "Follows from controller-manager-not-running")
	n.others[controllerManager].set(http.StatusOK, "ok")
	n.api.put(kubeclient.Object{"kind": "Node", "metadata": map[string]any{"name": nodeName}})
	n.healthy()
}

// A Node that was deleted while the kubelet runs comes back by itself.
func TestNodeDeleted(t *testing.T) {
	t.Parallel()
	var deleted atomic.Bool
	n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		services["kubelet"].Health = &dag.Health{Period: time.Millisecond, Check: func(context.Context) error {
			if deleted.Load() {
				return reason.With(kubelet.NodeDeleted, errors.New("the kubelet registers it again in 40s"))
			}
			return nil
		}}
	})
	deleted.Store(true)
	n.api.remove("Node", nodeName)
	n.finds("node-not-registered", failure, "registers it again in 40s", "kubectl delete node", "gbctl -n ADDRESS service kubelet restart")
	n.lacks("kubelet-not-running")
	deleted.Store(false)
	n.api.put(kubeclient.Object{"kind": "Node", "metadata": map[string]any{"name": nodeName}})
	n.healthy()
}

// A worker without a certificate has only its token, which isn't allowed to see nodes.
func TestS351WorkerNotRegistered(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.must(os.Remove(n.path(clientFile)))
	n.api.fail("/api/v1/nodes/"+nodeName, func(w http.ResponseWriter) {
		reply(w, http.StatusForbidden, map[string]any{"kind": "Status", "message": `nodes "n1" is forbidden: User "system:bootstrap:q9pyzr" cannot get resource "nodes"`, "reason": "Forbidden"})
	})
	n.finds("node-not-registered", failure, "is forbidden", "none of a kubelet")
}

// S-352, guide: node not ready.
func TestS352NodeNotReady(t *testing.T) {
	t.Parallel()
	const cni = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin returns error: cni plugin not initialized"
	notReady := func(status, message string, age time.Duration) kubeclient.Object {
		c := readiness("Ready", status, "KubeletNotReady", message)
		c["lastTransitionTime"] = time.Now().Add(-age).UTC().Format(time.RFC3339)
		return kubeclient.Object{"kind": "Node", "metadata": map[string]any{"name": nodeName}, "status": map[string]any{"conditions": []any{c}}}
	}
	n := start(t, config.Init)
	n.api.put(notReady("False", cni, time.Minute))
	n.api.put(kubeclient.Object{"kind": "Pod", "metadata": map[string]any{"name": "kube-flannel-25drx", "namespace": "kube-system"}, "status": map[string]any{"phase": "Pending"}})
	n.finds("node-not-ready", info, cni, "kube-flannel-25drx: Pending", "flannel")
	n.api.put(notReady("False", cni, time.Hour))
	n.finds("node-not-ready", failure, cni, "kube-flannel-25drx: Pending")
	// What containerd said long before the node was so isn't the cause.
	broken := func(at time.Time, file string) {
		fmt.Fprintf(n.logs.Writer("containerd"), `time="%s" level=error msg="failed to reload cni configuration after receiving fs change event(WRITE \"%s\")" `+
			`error="cni config load failed: failed to load CNI config list file %[2]s: error parsing configuration list: unexpected end of JSON input: invalid cni config: failed to load cni config"`+"\n",
			at.UTC().Format(time.RFC3339Nano), file)
	}
	broken(time.Now().Add(-time.Hour), "/etc/cni/net.d/05-former.conflist")
	n.api.put(notReady("False", cni, time.Minute))
	n.finds("node-not-ready", info, "isn't up on this node (flannel)")
	broken(time.Now(), "/etc/cni/net.d/00-foreign.conflist")
	n.finds("node-not-ready", failure, "A file of the pod network is broken: /etc/cni/net.d/00-foreign.conflist: error parsing configuration list: unexpected end of JSON input.", "reboot")
	n.api.put(notReady("Unknown", "Kubelet stopped posting node status.", time.Minute))
	n.finds("node-not-ready", failure, "stopped")
	// Long after its boot, a node has no reason to be so for minutes.
	n.age.Store(int64(time.Hour))
	n.api.put(notReady("False", "the disk is slow", problemTime/2))
	n.finds("node-not-ready", info, "the disk is slow")
	n.api.put(notReady("False", "the disk is slow", problemTime+time.Second))
	n.finds("node-not-ready", failure, "the disk is slow")
}

// After an upgrade Kubernetes may still say what was so before: the node says until when that is normal.
func TestNodeNotReadyAfterTheBoot(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.age.Store(int64(time.Minute))
	n.must(kubelet.NodeHealths.Put(n.store.As("test"), kubelet.HealthID, kubelet.NodeHealth{Serves: "no", Faults: []kubelet.Fault{
		{Object: kubelet.NodeObject, Code: kubelet.FormerBoot, Text: "Node: its kubelet hasn't reported since the boot"},
	}}))
	ends := time.Now().Add(bootstrapTime - time.Minute).UTC()
	n.finds("node-not-ready", info, "hasn't reported since the boot", "It should pass by itself before "+ends.Format("2006-01-02T15:"))
	n.later(bootstrapTime)
	n.finds("node-not-ready", failure, "hasn't reported since the boot")
}

func TestNodeCordoned(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.api.put(kubeclient.Object{"kind": "Node", "metadata": map[string]any{"name": nodeName}, "spec": map[string]any{"unschedulable": true}})
	n.finds("node-cordoned", warning, "kubectl uncordon n1")
}

// Pods of other namespaces on this node are looked at, too. Of many of them, some are shown.
func TestPodsFailing(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	pod := func(name, reason string) {
		n.api.put(kubeclient.Object{"kind": "Pod", "metadata": map[string]any{"name": name, "namespace": "shop"}, "status": map[string]any{"phase": "Pending",
			"containerStatuses": []any{map[string]any{"name": "web", "state": map[string]any{"waiting": map[string]any{"reason": reason, "message": "failed: not found"}}}}}})
	}
	pod("typo", "ImagePullBackOff")
	n.finds("image-pull-failing", warning, "pod shop/typo", "no image with this name")
	for i := range maxFindings + 3 {
		pod(fmt.Sprintf("web-%d", i), "CrashLoopBackOff")
	}
	n.finds("pods-failing", warning, "shop/web-", "CrashLoopBackOff", "kubectl -n shop logs web-", "--previous", "3 more findings pods-failing")
}

func TestNodePressure(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.api.put(kubeclient.Object{"kind": "Node", "metadata": map[string]any{"name": nodeName}, "status": map[string]any{"conditions": []any{
		readiness("Ready", "True", "KubeletReady", ""), readiness("DiskPressure", "True", "KubeletHasDiskPressure", "kubelet has disk pressure"),
	}}})
	n.finds("node-pressure", warning, "DiskPressure", "kubelet has disk pressure")
}

func TestSystemPodsFailing(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.api.put(kubeclient.Object{"kind": "Pod", "metadata": map[string]any{"name": "coredns-1", "namespace": "kube-system"}, "status": map[string]any{"phase": "Running",
		"containerStatuses": []any{map[string]any{"name": "coredns", "state": map[string]any{"waiting": map[string]any{"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}}}}})
	n.finds("system-pods-failing", warning, "kube-system/coredns-1", "CrashLoopBackOff", "back-off 5m0s")
	n.api.remove("Pod", "coredns-1")
	n.healthy()
	sees := func(f kubelet.Fault) {
		n.must(kubelet.NodeHealths.Put(n.store.As("test"), kubelet.HealthID, kubelet.NodeHealth{Faults: []kubelet.Fault{f}}))
	}
	n.later(bootstrapTime)
	sees(kubelet.Fault{Object: "kube-proxy", Code: kubelet.NoPod, Text: "no pod of kube-system/kube-proxy is on this node"})
	n.finds("system-pods-failing", warning, "The kube-proxy of this node doesn't work: no pod of kube-system/kube-proxy")
	sees(kubelet.Fault{Object: "kube-proxy", Code: "ImagePullBackOff", Text: "pod kube-system/kube-proxy-x: ImagePullBackOff"})
	n.healthy() // a condition of images
}

// S-354, guide: Worker node is stuck with apid health check failures.
func TestS354WorkerAPIWaits(t *testing.T) {
	t.Parallel()
	apid := func(n *node, services map[string]*dag.Service) {
		services["apid"] = &dag.Service{ID: "apid", Needs: []dag.Condition{never{}}, Run: services["kubelet"].Run}
	}
	n := start(t, config.Worker, apid)
	n.later(startTime)
	n.finds("worker-api-waits", failure, "certificate of the machine API")
	n.api.fail("/readyz", notReady)
	n.finds("worker-api-waits", info, "Follows from endpoint-not-answering")

	n = start(t, config.Worker, apid, func(n *node, _ map[string]*dag.Service) {
		port := freeport.Find(t)
		n.dial = func(ctx context.Context, _ netip.Addr, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", port.String())
		}
	})
	n.later(startTime)
	n.finds("worker-api-waits", failure, "It has no certificate: no control plane signs", "connection refused")
	n.lacks("controller-failing")

	n = start(t, config.Init, apid)
	n.later(startTime)
	n.finds("api-not-up", failure, "certificate of the machine API")
}

type never struct{}

func (never) String() string                 { return "the certificate of the machine API" }
func (never) Wait(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestCertificateExpired(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		id       string
		made     time.Duration
		severity bool
	}{
		{"certificate-expired", pki.LeafValidity + 24*time.Hour, true},
		{"certificate-expiring", pki.LeafValidity - 10*24*time.Hour, false},
	} {
		n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
			old, err := pki.NewKubernetesCA(time.Now().Add(-2 * c.made))
			n.must(err)
			crt, key, err := old.Issue(pki.Leaf{CN: "system:node:n1", Client: true, Now: time.Now().Add(-c.made)})
			n.must(err)
			n.write(string(crt)+string(key), clientFile)
		})
		if c.severity {
			n.finds(c.id, failure, "the kubelet as a client of the API server", "valid from")
		} else {
			n.finds(c.id, warning, "the kubelet as a client of the API server", "9 days")
		}
	}
}

func TestConfigurationConditions(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.situation = configuration.Situation{Version: 7, Try: time.Now().Add(time.Minute)}
	n.finds("configuration-tried", warning, "version 7", "gbctl -n ADDRESS config confirm")
	n.situation = configuration.Situation{Version: 7, Staged: true}
	n.finds("configuration-staged", info, "version 7", "gbctl -n ADDRESS reboot")
	n.situation = configuration.Situation{}
	n.text = append(n.text, "# a comment\n"...)
	n.healthy()
	n.text = []byte(strings.Replace(string(n.text), "type: worker", "type: worker\n  registries: {mirrors: {'*': {endpoints: ['http://10.5.0.1:5000']}}}", 1))
	n.healthy()
	n.text = []byte(strings.Replace(string(n.text), "type: worker", "type: join", 1))
	n.finds("configuration-warnings", warning, "machine.type", `"join" is an alias`)
}
