package configuration

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// TypeID names the one machine type.
const TypeID = "machine-type"

// Types says which part the node plays in its cluster.
var Types = resource.Define[config.MachineType](resource.Definition{
	Type:      "MachineTypes.config.garboard.dev",
	Kind:      "MachineType",
	Namespace: "config",
	Columns:   []resource.Column{{Name: "TYPE", Value: func(s any) string { return string(s.(config.MachineType)) }}},
})

// TypeController publishes the node's part.
func TypeController() resource.Controller {
	return resource.Controller{
		Name: "config.MachineTypeController", Reconcile: publishType,
		Inputs:  []resource.Input{{Type: Configs.Type(), ID: ConfigID}},
		Outputs: []string{Types.Type()},
	}
}

func publishType(_ context.Context, v resource.View) (time.Duration, error) {
	o, err := Configs.Get(v, ConfigID)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	return 0, Types.Put(v, TypeID, o.Spec.Machine.Type)
}
