package controlplane

import "github.com/garboard-os/garboard/services/core/resource"

// EtcdID names the one EtcdStatus.
const EtcdID = "etcd"

// EtcdStatus is the state of this node's etcd member, as the etcd service sees it.
// It is defined here, by its reader, as the control plane is what waits for it.
type EtcdStatus struct {
	Ready    bool   `yaml:"ready"`
	Endpoint string `yaml:"endpoint"` // https://127.0.0.1:2379
	MemberID string `yaml:"memberID"` // hexadecimal
}

// EtcdStatuses has the one object EtcdID, on control planes.
var EtcdStatuses = resource.Define[EtcdStatus](resource.Definition{
	Type: "EtcdStatuses.v1alpha1.garboard.dev", Kind: "EtcdStatus", Namespace: "runtime",
	Columns: []resource.Column{{Name: "MEMBER", Value: func(spec any) string { return spec.(EtcdStatus).MemberID }}},
})

// etcdReady is false until this node's member serves.
func etcdReady(r resource.Reader) (EtcdStatus, bool) {
	o, err := EtcdStatuses.Get(r, EtcdID)
	return o.Spec, err == nil && o.Spec.Ready
}
