package selfhosted

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

const staticPod = `
apiVersion: v1
kind: Pod
metadata: {name: kube-apiserver, annotations: {garboard.dev/config-version: "1"}}
spec:
  priority: 2000001000
  priorityClassName: system-node-critical
  hostNetwork: true
  containers:
  - name: kube-apiserver
    image: registry.k8s.io/kube-apiserver:v1
    command: [kube-apiserver, --advertise-address=10.5.0.2, --client-ca-file=/system/secrets/kubernetes/kube-apiserver/ca.crt,
      --audit-policy-file=/etc/kubernetes/kube-apiserver/audit-policy.yaml, --audit-log-path=/var/log/audit/kube/kube-apiserver.log]
    volumeMounts:
    - {name: v0, mountPath: /system/secrets/kubernetes/kube-apiserver, readOnly: true}
    - {name: v1, mountPath: /etc/kubernetes/kube-apiserver, readOnly: true}
    - {name: v2, mountPath: /var/log/audit/kube, readOnly: false}
  volumes:
  - {name: v0, hostPath: {path: /system/secrets/kubernetes/kube-apiserver}}
  - {name: v1, hostPath: {path: /etc/kubernetes/kube-apiserver}}
  - {name: v2, hostPath: {path: /var/log/audit/kube}}
`

const podSpec = `
priorityClassName: system-node-critical
hostNetwork: true
automountServiceAccountToken: false
nodeSelector: {node-role.kubernetes.io/control-plane: ""}
tolerations: [{operator: Exists}]
containers:
- name: kube-apiserver
  image: registry.k8s.io/kube-apiserver:v1
  command: [kube-apiserver, --advertise-address=$(POD_IP), --client-ca-file=/etc/kubernetes/secrets/ca.crt,
    --audit-policy-file=/etc/kubernetes/secrets/audit-policy.yaml, --audit-log-path=/var/log/audit/kube/kube-apiserver.log]
  env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
  volumeMounts:
  - {name: v2, mountPath: /var/log/audit/kube, readOnly: false}
  - {name: secrets, mountPath: /etc/kubernetes/secrets, readOnly: true}
volumes:
- {name: v2, hostPath: {path: /var/log/audit/kube}}
- {name: secrets, secret: {secretName: kube-apiserver}}
`

func TestDaemonSet(t *testing.T) {
	t.Parallel()
	var pod, want object
	if err := yaml.Unmarshal([]byte(staticPod), &pod); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(podSpec), &want); err != nil {
		t.Fatal(err)
	}
	set, dirs := daemonSet(apiServer, pod)
	if !slices.Equal(dirs, []string{"/system/secrets/kubernetes/kube-apiserver", "/etc/kubernetes/kube-apiserver"}) {
		t.Errorf("its files are in %v", dirs)
	}
	if diff := cmp.Diff(want, part(part(part(set, "spec"), "template"), "spec")); diff != "" {
		t.Error(diff)
	}
	template := part(part(part(set, "spec"), "template"), "metadata")
	if diff := cmp.Diff(object{"labels": object{"k8s-app": apiServer, "tier": "control-plane"}, "annotations": object{"checkpointer.alpha.coreos.com/checkpoint": "true"}}, template); diff != "" {
		t.Error(diff)
	}
}

func TestObjectsHavePaths(t *testing.T) {
	t.Parallel()
	for _, o := range append(manifests("checkpointer"), checkpointerDaemonSet(), markPod("n"), secret("s", map[string][]byte{"a": []byte("b")})) {
		if _, err := json.Marshal(o); err != nil {
			t.Error(err)
		}
		if collections[o["kind"].(string)] == "" || pathOf(o) == collections[o["kind"].(string)] {
			t.Errorf("no path for %v", o["kind"])
		}
	}
}
