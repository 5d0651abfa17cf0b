package etcd

import "github.com/garboard-os/garboard/services/core/resource"

// StatusID is the ID of the only StatusSpec.
const StatusID = "etcd"

// StatusSpec is the state of this node's member. Only this package publishes it.
type StatusSpec struct {
	Ready    bool   `yaml:"ready"`
	Endpoint string `yaml:"endpoint"`                 // https://127.0.0.1:2379
	MemberID string `yaml:"memberID" column:"MEMBER"` // hexadecimal
	// the version of those that it was started with: secrets.StatusSpec
	Files string `yaml:"files"`
}

// Statuses has the object StatusID, on control planes.
var Statuses = resource.Define[StatusSpec](resource.Definition{
	Type: "EtcdStatuses.v1alpha1.garboard.dev", Kind: "EtcdStatus", Namespace: "runtime",
})

// Ready reports whether this node's member serves.
func Ready(r resource.Reader) (StatusSpec, bool) {
	o, err := Statuses.Get(r, StatusID)
	return o.Spec, err == nil && o.Spec.Ready
}
