package machine

import (
	"context"
	"errors"
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

// TypeController publishes the node's part (S-275).
type TypeController struct{}

// Name implements resource.Controller.
func (TypeController) Name() string { return "config.MachineTypeController" }

// Inputs implements resource.Controller.
func (TypeController) Inputs() []resource.Input {
	return []resource.Input{{Type: Configs.Type(), ID: ConfigID}}
}

// Outputs implements resource.Controller.
func (TypeController) Outputs() []string { return []string{Types.Type()} }

// Reconcile implements resource.Controller.
func (TypeController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	o, err := Configs.Get(v, ConfigID)
	if errors.Is(err, resource.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return 0, Types.Put(v, TypeID, o.Spec.Machine.Type)
}
