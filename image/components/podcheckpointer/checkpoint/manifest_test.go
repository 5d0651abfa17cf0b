package checkpoint

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func decode(t *testing.T, text string) *core.Pod {
	t.Helper()
	pod := &core.Pod{}
	if err := json.Unmarshal([]byte(text), pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

const parent = `{
"metadata": {"name": "a-1", "namespace": "kube-system", "uid": "u", "resourceVersion": "5", "generateName": "a-", "creationTimestamp": "2020-01-01T00:00:00Z",
  "ownerReferences": [{"kind": "DaemonSet"}], "managedFields": [{}], "labels": {"k8s-app": "a"},
  "annotations": {"checkpointer.alpha.coreos.com/checkpoint": "true", "other": "x"}},
"spec": {"serviceAccountName": "s", "serviceAccount": "s", "nodeName": "n", "nodeSelector": {"a": "b"}, "affinity": {}, "imagePullSecrets": [{"name": "p"}], "hostNetwork": true,
  "containers": [{"name": "c", "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    "volumeMounts": [{"name": "secrets", "mountPath": "/s"}, {"name": "token", "mountPath": "/t"}, {"name": "host", "mountPath": "/h"}]}],
  "volumes": [
    {"name": "secrets", "secret": {"secretName": "keys", "defaultMode": 420}},
    {"name": "config", "configMap": {"name": "settings", "optional": true, "items": [{"key": "k", "path": "sub/file"}]}},
    {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
    {"name": "host", "hostPath": {"path": "/run"}}]},
"status": {"phase": "Running"}}`

const child = `{"apiVersion": "v1", "kind": "Pod",
"metadata": {"name": "a-1", "namespace": "kube-system", "labels": {"k8s-app": "a"}, "annotations": {"checkpointer.alpha.coreos.com/checkpoint-of": "a-1"}},
"spec": {"hostNetwork": true,
  "containers": [{"name": "c", "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    "volumeMounts": [{"name": "secrets", "mountPath": "/s"}, {"name": "host", "mountPath": "/h"}]}],
  "volumes": [
    {"name": "secrets", "hostPath": {"path": "/dir/secrets/kube-system/a-1/keys"}},
    {"name": "config", "hostPath": {"path": "/dir/configmaps/kube-system/a-1/settings"}},
    {"name": "host", "hostPath": {"path": "/run"}}]}}`

func TestManifest(t *testing.T) {
	t.Parallel()
	pod := decode(t, parent)
	if !IsParent(pod) || IsOwn(pod) || ID(pod) != "kube-system/a-1" {
		t.Errorf("parent %v, own %v, ID %s", IsParent(pod), IsOwn(pod), ID(pod))
	}
	sources, err := Manifest(pod, "/dir")
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	if got := decode(t, string(text)); !reflect.DeepEqual(got, decode(t, child)) {
		t.Errorf("the static pod is %s", text)
	}
	want := []Source{
		{Kind: "secrets", Name: "keys", Dir: "/dir/secrets/kube-system/a-1/keys"},
		{Kind: "configmaps", Name: "settings", Optional: true, Paths: map[string]string{"k": "sub/file"}, Dir: "/dir/configmaps/kube-system/a-1/settings"},
	}
	if !reflect.DeepEqual(sources, want) {
		t.Errorf("it needs %+v", sources)
	}
	if IsParent(pod) {
		t.Error("a checkpoint has a checkpoint")
	}
}

func TestManifestRefuses(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{}`: "no name",
		`{"metadata": {"name": "a", "namespace": "b"}, "spec": {"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]}}`: "pod b/a: volume v: a projected volume",
	} {
		if _, err := Manifest(decode(t, text), "/dir"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	values := map[string][]byte{"a": []byte("1"), "b": []byte("2")}
	for name, tc := range map[string]struct {
		source Source
		want   map[string][]byte
		err    string
	}{
		"all":              {Source{}, values, ""},
		"items":            {Source{Paths: map[string]string{"a": "x/y"}}, map[string][]byte{"x/y": []byte("1")}, ""},
		"missing":          {Source{Paths: map[string]string{"c": "c"}}, nil, `no key "c"`},
		"missing optional": {Source{Paths: map[string]string{"c": "c"}, Optional: true}, map[string][]byte{}, ""},
		"outside":          {Source{Paths: map[string]string{"a": "../a"}}, nil, "outside"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := tc.source.Files(values)
			if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
			if tc.err == "" && !reflect.DeepEqual(got, tc.want) {
				t.Errorf("files %v", got)
			}
		})
	}
}

func TestTerminatingPodIsNoParent(t *testing.T) {
	t.Parallel()
	pod := decode(t, parent)
	pod.DeletionTimestamp = &meta.Time{}
	if IsParent(pod) {
		t.Error("a pod that is being deleted has a checkpoint")
	}
}
