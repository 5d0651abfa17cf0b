package configuration

import "github.com/garboard-os/garboard/services/core/resource"

// Stage is how far the node is with finding out what it is to be.
type Stage string

const (
	// Searching: a configuration is fetched over the network, so that this is up as if the configuration were empty.
	// Nobody can give the node another one yet.
	Searching Stage = "searching"
	// Maintenance: there is no usable configuration. The network is up as if the
	// configuration were empty, and the API takes a configuration and nothing else.
	Maintenance Stage = "maintenance"
	// Locked: no key of this machine opens STATE. The network is up as in maintenance mode, and the API takes a
	// recovery key and nothing else.
	Locked Stage = "locked"
	// Configured: Configs holds the applied configuration.
	Configured Stage = "configured"
)

// Anonymous reports whether the API answers clients that can't be authenticated.
func (s Stage) Anonymous() bool { return s == Maintenance || s == Locked }

// StageID names the one stage.
const StageID = "machine"

// Stages has one object from the moment on at which machined needs the network, or has looked at every source once.
var Stages = resource.Define[Stage](resource.Definition{
	Type:      "MachineStages.runtime.garboard.dev",
	Kind:      "MachineStage",
	Namespace: "runtime",
	Columns:   []resource.Column{{Name: "STAGE", Value: func(s any) string { return string(s.(Stage)) }}},
})

// Decided is the condition that every source was looked at once.
func Decided(store *resource.Store) *resource.Until {
	return Stages.When(store, StageID, "the configuration to be looked for", func(s Stage) bool { return s != Searching })
}
