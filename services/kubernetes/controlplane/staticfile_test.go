package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A pod that the kubelet has, but hasn't begun, is written again with the same UID until the
// kubelet begins it: otherwise it waits 10 to 15 s after the former pod has ended.
func TestStaticPodThatWaitsForItsPredecessor(t *testing.T) {
	f := start(t, testConfig(t))
	f.etcd(true)
	value := func(key string) (string, error) {
		text, err := os.ReadFile(f.file(scheduler))
		_, after, found := strings.Cut(line(text, key), key+": ")
		if err == nil && !found {
			err = fmt.Errorf("no %s in the file", key)
		}
		return strings.Trim(strings.TrimSpace(after), `"`), err
	}
	uid := func(not string) (uid string) {
		t.Helper()
		eventually.That(t, patience, "file of the scheduler", func() (err error) {
			if uid, err = value("uid"); err == nil && uid == not {
				err = errors.New("the same UID as before")
			}
			return err
		})
		return uid
	}
	say := func(uid string, containers ...any) {
		pod := kubeclient.Object{
			"metadata": object{"name": "kube-scheduler-n1", "uid": uid, "namespace": kubeSystem, "labels": object{"k8s-app": scheduler}, "annotations": object{"kubernetes.io/config.source": "file"}},
			"status":   object{"phase": "Pending", "containerStatuses": containers},
		}
		text, err := json.Marshal(object{"kind": "PodList", "items": list{pod}})
		put(t, err)
		f.kubelet.answer(http.StatusOK, string(text))
	}
	again := func(want string) {
		t.Helper()
		eventually.That(t, patience, "the pod again", func() error {
			got, err := value(startsAnnotation)
			if err == nil && got < want {
				err = fmt.Errorf("written %s times again", got)
			}
			return err
		})
	}
	first := uid("")
	say("another-pod's")
	say(first)
	again("1")
	again("2")
	if now, err := value("uid"); err != nil || now != first {
		t.Errorf("UID %s became %s: %v", first, now, err)
	}
	say(first, object{"restartCount": 0})
	f.configure(func(c *config.Config) { c.Cluster.Scheduler.Image = "registry.k8s.io/kube-scheduler:v1.35.1" })
	second := uid(first)
	if got, err := value(startsAnnotation); err == nil {
		t.Errorf("another pod begins with attempt %s", got)
	}
	say(second)
	again("1")
}

// The file of a pod that runs stays as it is while the image of its new form isn't on the node, and the status says so.
func TestStaticPodWaitsForItsImage(t *testing.T) {
	c := testConfig(t)
	former := c.Cluster.APIServer.Image
	f := newFixture(t, c)
	const wrong, right = "registry.k8s.io/kube-apiserver:1.36.3", "registry.k8s.io/kube-apiserver:v1.36.1"
	var asked sync.Map
	f.have = func(_ context.Context, image, instead string) error {
		asked.Store(image, true)
		if image == wrong {
			return reason.With("ImageNotFound", errors.New(instead+": pull image "+wrong+": not found"))
		}
		return nil
	}
	f.run()
	f.etcd(true)
	in := func(image string) {
		t.Helper()
		eventually.That(t, patience, "the file has "+image, func() error {
			text, err := os.ReadFile(f.file(apiServer))
			if err == nil && !strings.Contains(string(text), "image: "+image+"\n") {
				err = fmt.Errorf("%s", line(text, "image: "))
			}
			return err
		})
	}
	in(former)
	pod := kubeclient.Object{
		"metadata": object{"name": "kube-apiserver-n1", "namespace": kubeSystem, "labels": object{"k8s-app": apiServer}, "annotations": object{"kubernetes.io/config.source": "file"}},
		"status":   object{"containerStatuses": list{object{"restartCount": 0}}, "conditions": list{object{"type": "Ready", "status": "True"}}},
	}
	text, err := json.Marshal(object{"kind": "PodList", "items": list{pod}})
	put(t, err)
	f.kubelet.answer(http.StatusOK, string(text))
	f.configure(func(c *config.Config) { c.Cluster.APIServer.Image = wrong })
	status := func() (lacks kubeclient.Object) {
		o, _ := StaticPodStatuses.Get(f.store, kubeSystem+"/kube-apiserver-n1")
		lacks, _ = o.Spec[Lacks].(map[string]any)
		return lacks
	}
	eventually.That(t, patience, "what the pod waits for", func() error {
		if got := status(); got.Text("reason") != "ImageNotFound" || !strings.Contains(got.Text("message"), former) || !strings.Contains(got.Text("message"), wrong) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	if reasons := Unready(f.store); !slices.ContainsFunc(reasons, func(why string) bool { return strings.Contains(why, wrong+": not found") }) {
		t.Errorf("not ready: %q", reasons)
	}
	in(former)
	f.configure(func(c *config.Config) { c.Cluster.APIServer.Image = right })
	in(right)
	eventually.That(t, patience, "it waits no more", func() error {
		if got := status(); got != nil {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	if _, did := asked.Load(former); did {
		t.Error("a pod without a former form waited for its image")
	}
}

// A pod whose new image doesn't work gets its former file, until its configuration changes. What was ready with its
// image keeps it.
func TestStaticPodGoesBack(t *testing.T) {
	c := testConfig(t)
	former := c.Cluster.Scheduler.Image
	f := start(t, c)
	f.etcd(true)
	uid := func(image string) (uid string) {
		t.Helper()
		eventually.That(t, patience, "the file has "+image, func() error {
			text, err := os.ReadFile(f.file(scheduler))
			if err == nil && !strings.Contains(string(text), "image: "+image+"\n") {
				err = fmt.Errorf("%s", line(text, "image: "))
			}
			_, uid, _ = strings.Cut(line(text, "uid: "), "uid: ")
			return err
		})
		return strings.TrimSpace(uid)
	}
	serves := "True"
	say := func(uid string, restarts int, ready string) {
		pod := kubeclient.Object{
			"metadata": object{"name": "kube-scheduler-n1", "uid": uid, "namespace": kubeSystem, "labels": object{"k8s-app": scheduler}, "annotations": object{"kubernetes.io/config.source": "file"}},
			"status": object{"conditions": list{object{"type": "Ready", "status": ready}}, "containerStatuses": list{object{
				"restartCount": restarts, "lastState": object{"terminated": object{"message": "usage\nexec: kube-scheduler: not found\n"}},
			}}},
		}
		serving := kubeclient.Object{ // it is no longer one of these files
			"metadata": object{"name": "kube-apiserver-n1", "namespace": kubeSystem, "labels": object{"k8s-app": apiServer}, "annotations": object{"kubernetes.io/config.source": "file"}},
			"status":   object{"conditions": list{object{"type": "Ready", "status": serves}}},
		}
		text, err := json.Marshal(object{"kind": "PodList", "items": list{pod, serving}})
		put(t, err)
		f.kubelet.answer(http.StatusOK, string(text))
	}
	status := func(what string, want func(PodStatus) bool) {
		t.Helper()
		eventually.That(t, patience, what, func() error {
			o, err := StaticPodStatuses.Get(f.store, kubeSystem+"/kube-scheduler-n1")
			if err == nil && !want(o.Spec) {
				err = fmt.Errorf("%v", o.Spec)
			}
			return err
		})
	}
	ready := PodStatus.Ready
	lacks := func(s PodStatus) bool {
		return kubeclient.Object(s).Text(Lacks, "reason") == string(containerd.ImageSick)
	}
	configure := func(image string) { f.configure(func(c *config.Config) { c.Cluster.Scheduler.Image = image }) }

	say(uid(former), 0, "True")
	status("it is ready", ready)
	configure("coredns:v1")
	say(uid("coredns:v1"), containerd.TrialEnds, "False")
	say(uid(former), 0, "True")
	status("why it goes on", lacks)
	if reasons := strings.Join(Unready(f.store), "\n"); !strings.Contains(reasons, "goes on with "+former) || !strings.Contains(reasons, "image coredns:v1 doesn't work") ||
		!strings.Contains(reasons, "3 restarts, and isn't ready: it logged: exec: kube-scheduler: not found") {
		t.Errorf("not ready: %s", reasons)
	}
	f.configure(func(c *config.Config) { c.Cluster.APIServer.ExtraArgs = config.Args{"v": {"2"}} })
	uid(former)
	f.configure(func(c *config.Config) { c.Cluster.Scheduler.ExtraArgs = config.Args{"v": {"2"}} }) // it is tried again
	f.configure(func(c *config.Config) { c.Cluster.Scheduler.ExtraArgs = config.Args{"v": {"3"}} })
	// What it needs doesn't serve: that isn't the fault of the image.
	failed := containerd.TrialEnds + 2
	for _, serves = range []string{"False", "True"} {
		say(uid("coredns:v1"), failed, "False")
		status("what it needs serves: "+serves, func(s PodStatus) bool { now, _ := s.Fails(); return now == failed && !lacks(s) })
	}
	say(uid("coredns:v1"), failed+containerd.TrialEnds, "False")
	uid(former)
	f.configure(func(c *config.Config) { c.Cluster.Scheduler.ExtraArgs = config.Args{"v": {"4"}} })
	say(uid("coredns:v1"), 1, "True") // now it works
	status("it is ready with the new image", func(s PodStatus) bool { return ready(s) && !lacks(s) })
	for restarts := range containerd.TrialEnds + 2 {
		say(uid("coredns:v1"), restarts, "False")
		status("its restarts are known", func(s PodStatus) bool { now, _ := s.Fails(); return now == restarts && !ready(s) && !lacks(s) })
	}
}

// An image isn't on trial while etcd doesn't serve, and for as long after it as any new one.
func TestOutageOfEtcdIsNotTheImagesFault(t *testing.T) {
	t.Parallel()
	c, v, pod := following(t)
	c.good[apiServer] = starts{uid: "before", image: "former:v1", pod: c.starts[apiServer].pod}
	follow := func(what string, restarts int, age time.Duration, sick bool) {
		t.Helper()
		now := c.starts[apiServer]
		now.since = now.since.Add(-age)
		c.starts[apiServer] = now
		// The kubelet may have the time of a former pod.
		pod["status"] = object{"startTime": time.Now().Add(-time.Hour).Format(time.RFC3339), "containerStatuses": list{object{"restartCount": restarts}}}
		put(t, c.follow(t.Context(), v, []kubeclient.Object{pod}))
		if why := c.bad[apiServer].sick; (why != nil) != sick {
			t.Errorf("%s: %v", what, why)
		}
	}
	c.up = time.Now()
	follow("it has just been written", 0, 0, false)
	c.down = time.Now()
	follow("etcd doesn't serve", 7, 2*containerd.TrialTime, false)
	c.up = time.Now()
	follow("etcd serves", 7, 0, false)
	follow("etcd has served for minutes", 7, containerd.TrialTime+time.Second, true)
	delete(c.bad, apiServer)
	c.starts[apiServer] = starts{uid: pod.Text("metadata", "uid"), image: "new:v1", pod: c.starts[apiServer].pod, since: time.Now(), ends: 7}
	follow("it ends once more", 8, 0, false)
	follow("it ends again and again", 7+containerd.TrialEnds, 0, true)
}

// following is a controller that has written the file of the API server, and the pod that the kubelet has of it.
func following(t *testing.T) (*KubeletStaticPodController, view, kubeclient.Object) {
	t.Helper()
	v := view{testStore(t, testConfig(t)).As("test"), testLog(t)}
	c := &KubeletStaticPodController{staticPodsDir: t.TempDir()}
	wanted := kubeclient.Object{"metadata": object{"name": apiServer, "annotations": object{}}, "spec": object{"containers": list{object{"image": "new:v1"}}}}
	c.lacks(t.Context(), apiServer, wanted)
	put(t, StaticPods.Put(v, apiServer, wanted))
	_, err := c.file(apiServer, wanted)
	put(t, err)
	return c, v, kubeclient.Object{
		"metadata": object{"uid": c.starts[apiServer].uid, "labels": object{"k8s-app": apiServer}},
		// nobody listens there
		"spec": object{"containers": list{object{"readinessProbe": object{"httpGet": object{"port": 1, "path": "/readyz"}}}}},
	}
}

// An API server whose client of etcd makes long pauses after an outage is started again, once.
func TestDeafAPIServerIsStartedAgain(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for what, tc := range map[string]struct {
		down, up, began time.Time
		ready           string
		again           bool
	}{
		"after an outage of minutes": {now.Add(-3 * time.Minute), now.Add(-5 * time.Second), now.Add(-time.Hour), "False", true},
		"it is ready":                {now.Add(-3 * time.Minute), now.Add(-5 * time.Second), now.Add(-time.Hour), "True", false},
		"a short outage":             {now.Add(-15 * time.Second), now.Add(-5 * time.Second), now.Add(-time.Hour), "False", false},
		"during the outage":          {now.Add(-3 * time.Minute), time.Time{}, now.Add(-time.Hour), "False", false},
		"it has ended long ago":      {now.Add(-time.Hour), now.Add(-3 * time.Minute), now.Add(-2 * time.Hour), "False", false},
		"it began after the outage":  {now.Add(-3 * time.Minute), now.Add(-5 * time.Second), now.Add(-2 * time.Second), "False", false},
		"no outage is known":         {time.Time{}, now.Add(-5 * time.Second), now.Add(-time.Hour), "False", false},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, v, pod := following(t)
			c.down, c.up = tc.down, tc.up
			var killed []string
			c.kill = func(_ context.Context, container string) error { killed = append(killed, container); return nil }
			pod["status"] = object{"conditions": list{object{"type": "Ready", "status": tc.ready}}, "containerStatuses": list{object{
				"restartCount": 0, "containerID": "containerd://a1", "state": object{"running": object{"startedAt": tc.began.Format(time.RFC3339)}},
			}}}
			for range 3 {
				put(t, c.follow(t.Context(), v, []kubeclient.Object{pod}))
			}
			if want := map[bool][]string{true: {"a1"}}[tc.again]; !slices.Equal(killed, want) {
				t.Errorf("killed: %q, want %q", killed, want)
			}
		})
	}
}
