package controlplane

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

func TestCNIConfig(t *testing.T) {
	text, err := cniConfig("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_IPV6_NETWORK=fd00::/56\nFLANNEL_IPV6_SUBNET=fd00:0:0:3::1/64\nFLANNEL_MTU=1450\n")
	put(t, err)
	var got map[string]any
	put(t, json.Unmarshal(text, &got))
	want := map[string]any{
		"cniVersion": "1.0.0", "name": "cbr0",
		"plugins": []any{
			map[string]any{
				"type": "bridge", "bridge": "cni0", "mtu": 1450.0, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": "/run/cni",
					"ranges": []any{[]any{map[string]any{"subnet": "10.244.3.0/24"}}, []any{map[string]any{"subnet": "fd00:0:0:3::/64"}}},
					"routes": []any{map[string]any{"dst": "10.244.0.0/16"}, map[string]any{"dst": "fd00::/56"}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}, "backend": "nftables", "snat": true},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, env := range map[string]string{
		"empty":       "",
		"half":        "FLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\n",
		"no subnet":   "FLANNEL_MTU=1450\n",
		"not numbers": "FLANNEL_NETWORK=x\nFLANNEL_SUBNET=y\nFLANNEL_MTU=z\n",
	} {
		if got, err := cniConfig(env); err == nil {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// S-221: the label always, the taint as configured, and taints by others stay.
func TestNodePatch(t *testing.T) {
	theirs := object{"key": "theirs", "effect": "NoExecute"}
	ours := object{"key": config.ControlPlaneRole, "effect": "NoSchedule"}
	label := object{"labels": object{config.ControlPlaneRole: ""}}
	node := func(labelled bool, taints ...any) kubeclient.Object {
		meta := object{"name": "n1", "resourceVersion": "7"}
		if labelled {
			meta["labels"] = object{config.ControlPlaneRole: ""}
		}
		return kubeclient.Object{"metadata": meta, "spec": object{"taints": taints}}
	}
	for _, tt := range []struct {
		name  string
		allow bool
		node  kubeclient.Object
		want  kubeclient.Object
	}{
		{"done", false, node(true, ours), nil},
		{"done, schedulable", true, node(true, theirs), nil},
		{"label only", false, node(false, theirs, ours), kubeclient.Object{"metadata": label}},
		{"new", false, node(false), kubeclient.Object{
			"metadata": object{"labels": label["labels"], "resourceVersion": "7"}, "spec": object{"taints": list{object{"key": config.ControlPlaneRole, "value": "", "effect": "NoSchedule"}}},
		}},
		{"taint to go", true, node(true, theirs, ours), kubeclient.Object{
			"metadata": object{"resourceVersion": "7"}, "spec": object{"taints": list{theirs}},
		}},
	} {
		c := testConfig(t)
		c.Cluster.AllowSchedulingOnControlPlanes = tt.allow
		if diff := cmp.Diff(tt.want, nodePatch(c, tt.node, nil)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// Labels and taints follow the configuration; those set by others stay.
func TestNodePatchFollowsTheConfiguration(t *testing.T) {
	t.Parallel()
	node := func(labels, annotations object, taints ...any) kubeclient.Object {
		return kubeclient.Object{"metadata": object{"resourceVersion": "7", "labels": labels, "annotations": annotations}, "spec": object{"taints": taints}}
	}
	theirs := object{"key": "theirs", "effect": "NoExecute"}
	role := object{"key": config.ControlPlaneRole, "effect": "NoSchedule"}
	taint := func(key, value, effect string) object { return object{"key": key, "value": value, "effect": effect} }
	for name, tt := range map[string]struct {
		typ    config.MachineType
		labels map[string]string
		taints map[string]config.Taint
		node   kubeclient.Object
		want   kubeclient.Object
	}{
		"worker, registered": {config.Worker, map[string]string{"a": "1"}, map[string]config.Taint{"t": {Effect: "NoSchedule"}},
			node(object{"a": "1", "theirs": "x"}, nil), kubeclient.Object{"metadata": object{"annotations": object{labelsAnnotation: "a"}}}},
		"worker, noted": {config.Worker, map[string]string{"a": "1"}, nil, node(object{"a": "1"}, object{labelsAnnotation: "a"}), nil},
		"worker, changed": {config.Worker, map[string]string{"a": "2", "c": ""}, nil,
			node(object{"a": "1", "b": "1", "theirs": "x"}, object{labelsAnnotation: "a,b,gone", "theirs": "y"}),
			kubeclient.Object{"metadata": object{"labels": object{"a": "2", "b": nil, "c": ""}, "annotations": object{labelsAnnotation: "a,c"}}}},
		"worker, none left": {config.Worker, nil, nil, node(object{"a": "1"}, object{labelsAnnotation: "a"}),
			kubeclient.Object{"metadata": object{"labels": object{"a": nil}, "annotations": object{labelsAnnotation: nil}}}},
		"worker with nothing": {config.Worker, nil, nil, node(nil, nil, theirs), nil},
		"control plane, taints": {config.ControlPlane, nil, map[string]config.Taint{"a": {Value: "2", Effect: "NoSchedule"}, "b": {Effect: "NoExecute"}},
			node(object{config.ControlPlaneRole: ""}, object{taintsAnnotation: "a=NoSchedule,b=NoSchedule,c=NoExecute"},
				theirs, role, taint("a", "1", "NoSchedule"), taint("b", "", "NoSchedule"), taint("c", "", "NoExecute")),
			kubeclient.Object{
				"metadata": object{"resourceVersion": "7", "annotations": object{taintsAnnotation: "a=NoSchedule,b=NoExecute"}},
				"spec":     object{"taints": list{theirs, role, taint("a", "2", "NoSchedule"), taint("b", "", "NoExecute")}},
			}},
		"control plane, done": {config.ControlPlane, nil, map[string]config.Taint{"a": {Value: "2", Effect: "NoSchedule"}},
			node(object{config.ControlPlaneRole: ""}, object{taintsAnnotation: "a=NoSchedule"}, role, taint("a", "2", "NoSchedule")), nil},
	} {
		c := testConfig(t)
		c.Cluster.AllowSchedulingOnControlPlanes = false
		c.Machine.Type, c.Machine.Kubelet.NodeLabels, c.Machine.Kubelet.NodeTaints = tt.typ, tt.labels, tt.taints
		if diff := cmp.Diff(tt.want, nodePatch(c, tt.node, nil)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
