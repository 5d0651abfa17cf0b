package controlplane

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
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
