package udev

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// ModuleStatus is one module of machine.kernel.modules; its ID is the name there.
type ModuleStatus struct {
	Loaded  bool   `yaml:"loaded" column:"LOADED"` // or built in
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// ModuleStatuses has an object for each module of machine.kernel.modules.
var ModuleStatuses = resource.Define[ModuleStatus](resource.Definition{
	Type:      "KernelModuleStatuses.runtime.garboard.dev",
	Kind:      "KernelModuleStatus",
	Aliases:   []string{"kernelmodules", "modules"},
	Namespace: "runtime",
})

// retryModules is how often a module that couldn't be loaded is tried again: its device may be added.
const retryModules = time.Minute

// ModuleController loads the modules of the configuration.
func ModuleController(o Options) resource.Controller {
	c := &configured{mode: o.Mode, open: func() (*Modules, error) { return RunningModules("/") }}
	return c.controller()
}

func (c *configured) controller() resource.Controller {
	return resource.Controller{
		Name: "runtime.KernelModuleController", Reconcile: c.makeSo,
		Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}},
		Outputs: []string{ModuleStatuses.Type()},
	}
}

type configured struct {
	mode boot.Mode
	open func() (*Modules, error)
}

func (c *configured) makeSo(_ context.Context, v resource.View) (time.Duration, error) {
	wanted, err := configuration.Wanted(v, func(c *config.Config) []config.KernelModule { return c.Machine.Kernel.Modules })
	if err != nil {
		return 0, err
	}
	var modules *Modules
	if len(wanted) > 0 && c.mode == boot.Machine {
		if modules, err = c.open(); err != nil {
			return 0, err
		}
	}
	var again time.Duration
	statuses := map[string]ModuleStatus{}
	for _, m := range wanted {
		status := ModuleStatus{Loaded: true}
		if modules == nil {
			status = ModuleStatus{Problem: "a container has the modules of its host"}
		} else {
			name := canonical(m.Name)
			module := modules.of(name)
			given := strings.Fields(module.parameters) // by the kernel's command line
			late := slices.ContainsFunc(m.Parameters, func(p string) bool { return !slices.Contains(given, p) })
			module.parameters = strings.Join(slices.Concat(m.Parameters, []string{module.parameters}), " ")
			if err := modules.Load(name); err != nil {
				status, again = ModuleStatus{Problem: err.Error()}, retryModules
			} else if old, err := ModuleStatuses.Get(v, m.Name); late && module.hadBefore() && (err != nil || old.Spec != status) {
				status.Problem = fmt.Sprintf("was loaded before the configuration was known, without these parameters: use machine.install.extraKernelArgs, for example %s.%s", name, m.Parameters[0])
			}
		}
		if old, err := ModuleStatuses.Get(v, m.Name); (err != nil || old.Spec != status) && status.Problem != "" {
			v.Log().Warn("machine.kernel.modules", "module", m.Name, "problem", status.Problem)
		}
		statuses[m.Name] = status
	}
	return again, ModuleStatuses.Replace(v, statuses)
}
