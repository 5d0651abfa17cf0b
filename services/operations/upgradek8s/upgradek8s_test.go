package upgradek8s

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	nodes "github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/operationtest"
)

// upwards is all that an upgrade changes, in its order (S-317).
func upwards() (all []string) {
	for _, c := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"} {
		for _, n := range []string{"n1", "n2", "n3"} {
			all = append(all, n+" "+c+" "+newer)
		}
	}
	all = append(all, "daemonset "+newer)
	for _, n := range []string{"n1", "n2", "n3", "w1"} {
		all = append(all, n+" cordon", n+" kubelet "+newer, n+" uncordon")
	}
	return all
}

func (r *rig) expect(want []string) {
	r.T.Helper()
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if diff := cmp.Diff(want, r.Did); diff != "" {
		r.T.Errorf("what was changed (-want +got):\n%s", diff)
	}
}

func (r *rig) versions(component string) (all []string) {
	for _, m := range r.nodes {
		v, _ := config.VersionOf(r.images(m)[component])
		all = append(all, v)
	}
	return all
}

func TestS317Order(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if o.State != operation.Done {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.expect(upwards())
		if took := o.Ended.Sub(o.Began); took < 3*watchFirst || took > 10*time.Minute {
			t.Errorf("it took %s", took)
		}
		for _, m := range r.nodes {
			if !strings.HasPrefix(string(m.document), "# kept") || !strings.Contains(string(m.document), "mirror.example/") {
				t.Errorf("node %s: the document has lost something:\n%s", m.name, m.document)
			}
		}

		r.Did = nil
		if o = r.run(&apiv1.UpgradeKubernetesRequest{From: newer, To: older}); o.State != operation.Done {
			t.Errorf("down: %s: %s", o.State, o.Error)
		}
		first, last := r.Did[0], r.Did[len(r.Did)-1]
		if first != "n1 cordon" || last != "n3 kube-apiserver "+older {
			t.Errorf("down, the first change is %s, and the last one %s", first, last)
		}
	})
}

// What nodes pull is what `gbctl images list --for upgrade` lists for their configurations, also with other names than
// the default ones.
func TestPulledImages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var c config.Config
		c.Machine.Kubelet.Image, c.Cluster.APIServer.Image = "my.registry/kubelet:"+older, "my.registry:5000/k8s/kube-apiserver:"+older
		c.Cluster.ControllerManager.Image, c.Cluster.Scheduler.Image = "mirror.example/kube-controller-manager:"+older, "registry.k8s.io/kube-scheduler:"+older
		c.Cluster.Proxy.Image = "my.registry/kube-proxy:" + older
		for _, m := range r.nodes {
			m.document = fmt.Appendf(nil, "machine: {kubelet: {image: %q}}\n", c.Machine.Kubelet.Image)
			if m.name != "w1" {
				m.document = fmt.Appendf(m.document, "cluster: {apiServer: {image: %q}, controllerManager: {image: %q}, scheduler: {image: %q}, proxy: {image: %q}}\n",
					c.Cluster.APIServer.Image, c.Cluster.ControllerManager.Image, c.Cluster.Scheduler.Image, c.Cluster.Proxy.Image)
			}
		}
		r.boot()
		defer func() { r.Off() }()
		if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		listed, err := c.KubernetesImages(newer)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"10.5.0.5 my.registry/kube-proxy:" + newer, "10.5.0.5 my.registry/kubelet:" + newer}
		for _, image := range listed {
			want = append(want, "10.5.0.2 "+image, "10.5.0.3 "+image, "10.5.0.4 "+image)
		}
		slices.Sort(want)
		slices.Sort(r.pulled)
		if diff := cmp.Diff(want, r.pulled); diff != "" {
			t.Errorf("pulled (-want +got):\n%s", diff)
		}
	})
}

func TestS319KilledAtEachChange(t *testing.T) {
	for i, what := range upwards() {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.Cut = what
				r.boot()
				defer func() { r.Off() }()
				if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
					t.Errorf("cut at %s: %s: %s", what, o.State, o.Error)
				}
				// A drain that was cut begins again; nothing else is done twice.
				slices.Sort(r.Did)
				want := upwards()
				slices.Sort(want)
				if diff := cmp.Diff(want, slices.Compact(r.Did)); diff != "" {
					t.Errorf("cut at %s (-want +got):\n%s", what, diff)
				}
			})
		})
	}
}

func TestS324LateFailureIsRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.dies, r.after = "mirror.example/kube-controller-manager:"+newer, 20*time.Second
		r.boot()
		defer func() { r.Off() }()
		o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if o.State != operation.Failed || !strings.Contains(o.Error, "kube-controller-manager ended after it was ready") {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.expect([]string{
			"n1 kube-apiserver " + newer, "n2 kube-apiserver " + newer, "n3 kube-apiserver " + newer,
			"n1 kube-controller-manager " + newer, "n1 kube-controller-manager " + older,
		})

		// The reason is gone: the same command goes on.
		r.dies, r.Did = "", nil
		if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
			t.Errorf("again: %s: %s", o.State, o.Error)
		}
		r.expect(upwards()[3:])
	})
}

// A record of an earlier release has the finished components by name. Its node was cut off while the step of a finished
// one was being undone, which is to say that it stays.
func TestS324FinishedInARecordOfAnEarlierRelease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.dies, r.after = "mirror.example/kube-controller-manager:"+newer, 20*time.Second
		r.Cut = "n1 kube-controller-manager " + older
		r.boot()
		defer func() { r.Off() }()
		o, err := r.start(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		operationtest.Put(t, err)
		dark := func() bool {
			r.Mu.Lock()
			defer r.Mu.Unlock()
			return r.Cut == operationtest.Dark
		}
		for !dark() {
			time.Sleep(time.Second)
		}
		r.Off()
		claim, err := r.Shared.Claim(t.Context(), operation.Holder{ID: o.ID})
		operationtest.Put(t, err)
		text, err := claim.Read(t.Context())
		operationtest.Put(t, err)
		var record map[string]any
		operationtest.Put(t, json.Unmarshal(text, &record))
		for _, s := range record["steps"].([]any) {
			switch step := s.(map[string]any); step["id"] {
			case "kube-apiserver":
				step["state"] = "undoing"
			case "kube-controller-manager":
				step["state"] = "undone"
			}
		}
		record["data"].(map[string]any)["finished"] = []string{"kube-apiserver"}
		record["seq"] = record["seq"].(float64) + 1
		text, err = json.Marshal(record)
		operationtest.Put(t, err)
		operationtest.Put(t, claim.Write(t.Context(), text))
		r.Cut = ""
		r.boot()
		if o = r.end(o.ID); o.State != operation.Failed {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		if got := r.versions("kube-apiserver"); !slices.Equal(got[:3], []string{newer, newer, newer}) {
			t.Errorf("kube-apiserver has versions %s", got)
		}
		if got := r.versions("kube-controller-manager"); slices.Contains(got, newer) {
			t.Errorf("kube-controller-manager has versions %s", got)
		}
	})
}

// A kubelet that was restarted reports its pods as not ready until it has probed them.
func TestS324UnreadyForLongIsRolledBack(t *testing.T) {
	for unready, want := range map[time.Duration]operation.State{5 * time.Second: operation.Done, time.Minute: operation.Failed} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.unready = unready
			r.boot()
			defer func() { r.Off() }()
			o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
			if o.State != want || want == operation.Failed && !strings.Contains(o.Error, "after it was ready, for 10s: kube-apiserver isn't ready") {
				t.Errorf("unready for %s: %s: %s", unready, o.State, o.Error)
			}
		})
	}
}

func TestCrashLoopIsRolledBackAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.dies, r.after = "registry.k8s.io/kube-scheduler:"+newer, -startTime
		r.boot()
		defer func() { r.Off() }()
		o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if o.State != operation.Failed {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		if got := r.versions("kube-scheduler"); slices.Contains(got, newer) {
			t.Errorf("the scheduler has versions %s", got)
		}
	})
}

func TestMissingImageChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.lacking = "ghcr.io/garboard-os/kubelet:" + newer
		r.boot()
		defer func() { r.Off() }()
		o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if o.State != operation.Failed || !strings.Contains(o.Error, r.lacking) {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.expect(nil)
	})
}

func TestAbortUndoesTheComponent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		o, err := r.start(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if err != nil {
			t.Fatal(err)
		}
		begun := func() bool {
			r.Mu.Lock()
			defer r.Mu.Unlock()
			return slices.Contains(r.Did, "n2 kube-controller-manager "+newer)
		}
		for !begun() {
			time.Sleep(time.Second)
		}
		if err := r.Runner.Abort(o.ID, "jo"); err != nil {
			t.Fatal(err)
		}
		if o = r.end(o.ID); o.State != operation.Aborted {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		if got := r.versions("kube-controller-manager"); slices.Contains(got, newer) {
			t.Errorf("kube-controller-manager has versions %s", got)
		}
		if got := r.versions("kube-apiserver"); !slices.Equal(got[:3], []string{newer, newer, newer}) {
			t.Errorf("kube-apiserver has versions %s", got)
		}
	})
}

func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		a      *apiv1.UpgradeKubernetesRequest
		change func(*rig)
		want   string
	}{
		"two minor versions":      {&apiv1.UpgradeKubernetesRequest{From: "v1.35.2", To: newer}, nil, "upgrade to the latest v1.36 first"},
		"two minor versions down": {&apiv1.UpgradeKubernetesRequest{From: newer, To: "v1.35.2"}, nil, "go down to v1.36 first"},
		"not supported":           {&apiv1.UpgradeKubernetesRequest{From: newer, To: "v1.38.0"}, nil, "isn't one that this release runs"},
		"another version":         {&apiv1.UpgradeKubernetesRequest{From: "v1.36.2", To: newer}, nil, "kube-apiserver has version v1.36.3, and not v1.36.2 or v1.37.2"},
		"a digest": {&apiv1.UpgradeKubernetesRequest{From: older, To: newer}, func(r *rig) {
			r.nodes[1].document = []byte(strings.Replace(string(r.nodes[1].document), "kube-apiserver:"+older, "kube-apiserver@sha256:0", 1))
		}, "node n2: image registry.k8s.io/kube-apiserver@sha256:0 has no version as its tag"},
		"a removed feature gate": {&apiv1.UpgradeKubernetesRequest{From: older, To: newer}, func(r *rig) {
			r.nodes[1].document = merged(t, r.nodes[1].document, "cluster: {scheduler: {extraArgs: {feature-gates: 'SidecarContainers=true,NodeSwap=true'}}}")
		}, "node n2: kube-scheduler doesn't start with the feature gate SidecarContainers of cluster.scheduler.extraArgs: Kubernetes has removed it in v1.37; remove it from the configuration first"},
		"sick": {&apiv1.UpgradeKubernetesRequest{From: older, To: newer}, func(r *rig) {
			r.dies, r.after = "registry.k8s.io/kube-scheduler:"+older, 0
		}, "kube-scheduler isn't ready: CrashLoopBackOff"},
		"not Ready": {&apiv1.UpgradeKubernetesRequest{From: older, To: newer}, func(r *rig) {
			r.falls = map[string]string{"w1": ""}
		}, "node w1 is NotReady: no network: gbctl -n 10.5.0.5 doctor"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				if c.change != nil {
					c.change(r)
				}
				r.boot()
				defer func() { r.Off() }()
				_, err := r.start(c.a)
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, and not %q", err, c.want)
				}
				r.expect(nil)
			})
		})
	}
}

// What has just started isn't ready for some seconds.
func TestStartedJustNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer func() { r.Off() }()
		r.nodes[2].changed["kube-scheduler"] = time.Now().Add(-startTime / 2)
		if _, err := r.start(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); err != nil {
			t.Error(err)
		}
	})
}

func TestDeprecatedAPIsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.metrics = `# TYPE apiserver_requested_deprecated_apis gauge
apiserver_requested_deprecated_apis{group="example.k8s.io",removed_release="1.37",resource="things",subresource="",version="v1beta1"} 1
apiserver_requested_deprecated_apis{group="example.k8s.io",removed_release="1.38",resource="others",subresource="",version="v1beta1"} 1
apiserver_requested_deprecated_apis{group="",removed_release="",resource="endpoints",subresource="",version="v1"} 1
`
		r.boot()
		defer func() { r.Off() }()
		o, err := r.Runner.Start(t.Context(), operation.Ask{Name: Name, Arguments: &apiv1.UpgradeKubernetesRequest{From: older, To: newer}, By: "jo", DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if len(o.Warnings) != 1 || !strings.Contains(o.Warnings[0], "example.k8s.io/v1beta1 things, which Kubernetes removes in v1.37") {
			t.Errorf("warnings: %q", o.Warnings)
		}
		r.expect(nil)
	})
}

// The node restarts before the first step: the step waits until the cluster answers.
func TestRestartBeforeTheFirstStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.Restart.On = true
		r.boot()
		defer func() { r.Off() }()
		if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
	})
}

// A node that isn't Ready any more isn't changed, and nor are those after it. What was changed is undone without it,
// and once it is mended, the same command goes on.
func TestStopsAtANodeThatIsNotReady(t *testing.T) {
	for change, want := range map[string][]string{
		"n1 kube-apiserver " + newer: {"n1 kube-apiserver " + newer, "n1 kube-apiserver " + older},
		"n3 kube-apiserver " + newer: append(upwards()[:4], "n1 kube-controller-manager "+older),
		"n3 kube-scheduler " + newer: upwards()[:9],
		"n2 kubelet " + newer:        append(upwards()[:19], "n2 cordon", "n2 kubelet "+older, "n2 uncordon", "n1 cordon", "n1 kubelet "+older, "n1 uncordon"),
	} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.falls = map[string]string{"n2": change}
				r.boot()
				defer func() { r.Off() }()
				o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
				why := "kubernetes hasn't served on node n2 for 5m0s; gbctl -n 10.5.0.3 doctor tells the cause, and once it is mended, the same command goes on: node n2: Node is NotReady: no network"
				if strings.Contains(change, kubelet.name) { // what the node itself knows comes later
					why = strings.ReplaceAll(why, ": Node", "")
				}
				if o.State != operation.Failed || strings.Contains(o.Error, "isn't undone") || !strings.Contains(o.Error, why) {
					t.Errorf("%s: %s", o.State, o.Error)
				}
				r.expect(want)
				if took := o.Ended.Sub(o.Began); took > 20*time.Minute {
					t.Errorf("it took %s", took)
				}
				r.falls = nil
				if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
					t.Errorf("again: %s: %s", o.State, o.Error)
				}
			})
		})
	}
}

// What Kubernetes needs on a node is stopped, which Kubernetes itself notices later.
func TestStopsAtANodeWhoseServiceIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.stops = map[string]string{"n2": "n1 kube-apiserver " + newer}
		r.boot()
		defer func() { r.Off() }()
		if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Failed || !strings.Contains(o.Error, "node n2 for 5m0s; gbctl -n 10.5.0.3 doctor tells the cause, and once it is mended, the same command goes on: service containerd isn't up: Stopped") {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.expect([]string{"n1 kube-apiserver " + newer, "n1 kube-apiserver " + older})
	})
}

// A node's own system pods must run after its kubelet was changed, unless they didn't before.
func TestSystemPodsMustRunAsBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.before = map[string][]nodes.Fault{"n1": {{Object: "kube-flannel", Text: "pod kube-system/kube-flannel-x: CrashLoopBackOff"}}}
		r.boot()
		defer func() { r.Off() }()
		if o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer}); o.State != operation.Done {
			t.Errorf("what one lacked before: %s: %s", o.State, o.Error)
		}

		r = newRig(t)
		r.breaks = map[string]bool{"n2": true}
		r.boot()
		defer func() { r.Off() }()
		o := r.run(&apiv1.UpgradeKubernetesRequest{From: older, To: newer})
		if o.State != operation.Failed || !strings.Contains(o.Error, "node n2: pod kube-system/kube-proxy-x: CrashLoopBackOff") {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		if got := r.versions("kubelet"); !slices.Equal(got, []string{older, older, older, older}) {
			t.Errorf("the kubelets have %q", got)
		}
		if slices.Contains(r.Did, "n3 kubelet "+newer) {
			t.Errorf("it went on: %q", r.Did)
		}
	})
}
