package controlplane

import (
	"maps"
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// ProgramConfig is the configuration of one program of the control plane:
// APIServerConfig, ControllerManagerConfig or SchedulerConfig. It is for users and other nodes: the pod is made from
// the machine's configuration itself.
type ProgramConfig interface{ program() string }

// Configs are the programs' configurations, by their names. Their
// version is on the pod as annotation garboard.dev/config-version,
// which shows when a change has arrived.
var Configs = resource.Define[ProgramConfig](resource.Definition{
	Type: "KubernetesControlPlaneConfigs.config.garboard.dev", Kind: "KubernetesControlPlaneConfig", Aliases: []string{"kcpc"}, Namespace: configNamespace,
})

// APIServerConfig is kube-apiserver's.
type APIServerConfig struct {
	Image                string          `yaml:"image"`
	CloudProvider        string          `yaml:"cloudProvider"`
	ControlPlaneEndpoint string          `yaml:"controlPlaneEndpoint"`
	EtcdServers          []string        `yaml:"etcdServers"`
	LocalPort            int             `yaml:"localPort"`
	ServiceCIDR          string          `yaml:"serviceCIDR"`
	ExtraArgs            config.Args     `yaml:"extraArgs"`
	ExtraVolumes         []config.Volume `yaml:"extraVolumes"`

	AuditPolicy      config.Object            `yaml:"auditPolicy,omitempty"`
	AdmissionControl []config.AdmissionPlugin `yaml:"admissionControl,omitempty"`
}

// ControllerManagerConfig is kube-controller-manager's.
type ControllerManagerConfig struct {
	Image         string          `yaml:"image"`
	CloudProvider string          `yaml:"cloudProvider"`
	PodCIDR       string          `yaml:"podCIDR"`
	ServiceCIDR   string          `yaml:"serviceCIDR"`
	ExtraArgs     config.Args     `yaml:"extraArgs"`
	ExtraVolumes  []config.Volume `yaml:"extraVolumes"`
}

// SchedulerConfig is kube-scheduler's.
type SchedulerConfig struct {
	Image        string          `yaml:"image"`
	ExtraArgs    config.Args     `yaml:"extraArgs"`
	ExtraVolumes []config.Volume `yaml:"extraVolumes"`
}

func (APIServerConfig) program() string         { return apiServer }
func (ControllerManagerConfig) program() string { return controllerManager }
func (SchedulerConfig) program() string         { return scheduler }

// localEtcd: each apiserver uses the member on its own node.
const localEtcd = "https://127.0.0.1:2379"

func programConfigs(c *config.Cluster) []ProgramConfig {
	return []ProgramConfig{
		APIServerConfig{
			Image:                c.APIServer.Image,
			ControlPlaneEndpoint: c.ControlPlane.Endpoint.String(),
			EtcdServers:          []string{localEtcd},
			LocalPort:            c.ControlPlane.LocalAPIServerPort,
			ServiceCIDR:          config.Joined(c.Network.ServiceSubnets, ","),
			ExtraArgs:            maps.Clone(c.APIServer.ExtraArgs),
			ExtraVolumes:         slices.Clone(c.APIServer.ExtraVolumes),
			AuditPolicy:          c.APIServer.AuditPolicy,
			AdmissionControl:     c.APIServer.AdmissionControl,
		},
		ControllerManagerConfig{
			Image:        c.ControllerManager.Image,
			PodCIDR:      config.Joined(c.Network.PodSubnets, ","),
			ServiceCIDR:  config.Joined(c.Network.ServiceSubnets, ","),
			ExtraArgs:    maps.Clone(c.ControllerManager.ExtraArgs),
			ExtraVolumes: slices.Clone(c.ControllerManager.ExtraVolumes),
		},
		SchedulerConfig{
			Image:        c.Scheduler.Image,
			ExtraArgs:    maps.Clone(c.Scheduler.ExtraArgs),
			ExtraVolumes: slices.Clone(c.Scheduler.ExtraVolumes),
		},
	}
}

// controlPlaneConfig is the machine configuration, or nil if there is none yet
// or the node is a worker.
func controlPlaneConfig(r resource.Reader) (*config.Config, error) {
	c, err := configuration.Config(r)
	if err != nil || !c.Machine.Type.ControlPlane() {
		return nil, resource.IgnoreNotFound(err)
	}
	return c, nil
}
