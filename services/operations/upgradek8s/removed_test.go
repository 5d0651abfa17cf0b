package upgradek8s

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

func merged(t *testing.T, document []byte, patch string) []byte {
	t.Helper()
	document, err := merge.Apply(document, []byte(patch))
	if err != nil {
		t.Fatal(err)
	}
	return document
}

func TestRemovedSettings(t *testing.T) {
	config, err := rollout.ParseConfig([]byte(`
machine: {kubelet: {extraArgs: {v: 2, feature-gates: "HostnameOverride=true, NodeLogQuery=false"}}}
cluster: {apiServer: {extraArgs: {feature-gates: "kube:HostnameOverride=False,GitRepoVolumeDriver=false,MemoryManager=true"}}}
`))
	if err != nil {
		t.Fatal(err)
	}
	args := argsOf(config)
	const (
		logs     = "kubelet doesn't start with the feature gate NodeLogQuery=false of machine.kubelet.extraArgs: it is always true in v1.36; remove it from the configuration first, by `gbctl patch mc`"
		memory   = "kube-apiserver doesn't start with the feature gate MemoryManager of cluster.apiServer.extraArgs: Kubernetes has removed it in v1.36; remove it from the configuration first, by `gbctl patch mc`"
		hostname = "kube-apiserver doesn't start with the feature gate HostnameOverride=false of cluster.apiServer.extraArgs: it is always true in v1.37; remove it from the configuration first, by `gbctl patch mc`"
	)
	for _, tt := range []struct {
		a            *apiv1.UpgradeKubernetesRequest
		controlPlane bool
		want         []string
	}{
		{&apiv1.UpgradeKubernetesRequest{From: "v1.35.4", To: older}, true, []string{memory, logs}},
		{&apiv1.UpgradeKubernetesRequest{From: "v1.35.4", To: older, NoKubelet: true}, true, []string{memory}},
		{&apiv1.UpgradeKubernetesRequest{From: "v1.35.4", To: older}, false, []string{logs}},
		{&apiv1.UpgradeKubernetesRequest{From: older, To: newer}, true, []string{hostname}},
		{&apiv1.UpgradeKubernetesRequest{From: newer, To: older}, true, nil},
		{&apiv1.UpgradeKubernetesRequest{From: newer, To: newer}, true, nil},
	} {
		s := state{Node: rollout.Node{Name: "n1", ControlPlane: tt.controlPlane}, args: args}
		if diff := cmp.Diff(tt.want, s.removed(tt.a)); diff != "" {
			t.Errorf("%+v: %s", tt.a, diff)
		}
	}
}
