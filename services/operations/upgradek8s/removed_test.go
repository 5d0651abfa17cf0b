package upgradek8s

import (
	"testing"

	"github.com/google/go-cmp/cmp"

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
machine: {kubelet: {extraArgs: {pod_infra_container_image: x, v: 2, feature-gates: "ImageVolume=true, SystemdWatchdog=false"}}}
cluster: {apiServer: {extraArgs: {feature-gates: "kube:ImageVolume=False,GitRepoVolumeDriver=false,PodIndexLabel=true"}}}
`))
	if err != nil {
		t.Fatal(err)
	}
	args := argsOf(config)
	const (
		flag     = "kubelet doesn't start with the flag pod-infra-container-image of machine.kubelet.extraArgs: Kubernetes has removed it in v1.35; remove it from the configuration first, by `gbctl patch mc`"
		watchdog = "kubelet doesn't start with the feature gate SystemdWatchdog=false of machine.kubelet.extraArgs: it is always true in v1.35; remove it from the configuration first, by `gbctl patch mc`"
		label    = "kube-apiserver doesn't start with the feature gate PodIndexLabel of cluster.apiServer.extraArgs: Kubernetes has removed it in v1.35; remove it from the configuration first, by `gbctl patch mc`"
		volume   = "kube-apiserver doesn't start with the feature gate ImageVolume=false of cluster.apiServer.extraArgs: it is always true in v1.36; remove it from the configuration first, by `gbctl patch mc`"
	)
	for _, tt := range []struct {
		a            Arguments
		controlPlane bool
		want         []string
	}{
		{Arguments{From: "v1.34.4", To: older}, true, []string{label, flag, watchdog}},
		{Arguments{From: "v1.34.4", To: older, NoKubelet: true}, true, []string{label}},
		{Arguments{From: "v1.34.4", To: older}, false, []string{flag, watchdog}},
		{Arguments{From: older, To: newer}, true, []string{volume}},
		{Arguments{From: newer, To: older}, true, nil},
		{Arguments{From: newer, To: newer}, true, nil},
	} {
		s := state{Node: rollout.Node{Name: "n1", ControlPlane: tt.controlPlane}, args: args}
		if diff := cmp.Diff(tt.want, s.removed(tt.a)); diff != "" {
			t.Errorf("%+v: %s", tt.a, diff)
		}
	}
}
