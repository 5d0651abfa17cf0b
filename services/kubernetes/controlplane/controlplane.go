// Package controlplane runs Kubernetes' control plane as static pods, and gives a
// new cluster what it needs first.
//
// The machine configuration is the one source. Controllers turn it into files that
// the kubelet watches, and keep the files so:
//
//	MachineConfigs ─→ KubernetesControlPlaneConfigs ─┐
//	SecretsStatuses (content hash), EtcdStatuses ────┴→ StaticPods ─→ /etc/kubernetes/manifests ─→ kubelet
//	                                                                  StaticPodStatuses ←───────────┘
//	MachineConfigs ─→ Manifests (bootstrap manifests) ─→ API server: what is missing is made, nothing is ever changed
//	                  ManifestDrifts ←───────────────────────┘ what differs there
//
// It takes no part in scheduling or in anything that Kubernetes does by itself.
package controlplane

import (
	"errors"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

// Namespaces of the resources here.
const (
	namespace       = "controlplane"
	configNamespace = "config"
	extrasNamespace = "extras"
	kubeSystem      = "kube-system" // where Kubernetes itself lives in the cluster
)

// Programs of the control plane, which are also the names of their pods and of
// their configurations.
const (
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
)

var programs = []string{apiServer, controllerManager, scheduler}

// StaticPods are the pods that the kubelet runs from files (S-261): the spec is
// the pod.
var StaticPods = resource.Define[kubeclient.Object](resource.Definition{
	Type: "StaticPods.kubernetes.garboard.dev", Kind: "StaticPod", Namespace: namespace,
})

// StaticPodStatuses are what the kubelet reports about them (S-263); the ID is
// namespace/name.
var StaticPodStatuses = resource.Define[PodStatus](resource.Definition{
	Type: "StaticPodStatuses.kubernetes.garboard.dev", Kind: "StaticPodStatus", Namespace: namespace,
	Columns: []resource.Column{{Name: "READY", Value: func(spec any) string {
		if spec.(PodStatus).Ready() {
			return "True"
		}
		return "False"
	}}},
})

// PodStatus is a pod's status as the kubelet has it.
type PodStatus kubeclient.Object

// Ready is the pod's own condition.
func (s PodStatus) Ready() bool {
	return kubeclient.Object{"status": map[string]any(s)}.Condition("Ready")
}

// BootstrapStatus says how the control plane runs.
type BootstrapStatus struct {
	// SelfHosted: as pods of the cluster itself, as older systems had it.
	SelfHosted bool `yaml:"selfHosted"`
}

// BootstrapStatuses has the one object "control-plane" (S-260).
var BootstrapStatuses = resource.Define[BootstrapStatus](resource.Definition{
	Type: "BootstrapStatuses.v1alpha1.garboard.dev", Kind: "BootstrapStatus", Aliases: []string{"bs"}, Namespace: "runtime",
	Columns: []resource.Column{{Name: "SELF HOSTED", Value: func(spec any) string {
		if spec.(BootstrapStatus).SelfHosted {
			return "true"
		}
		return "false"
	}}},
})

// Options are what the controllers stand on. Paths are for tests: "" is a node's.
type Options struct {
	Logs *logs.Logs

	StaticPodsDir string // boot.StaticPodsDir
	FilesDir      string // configuration files of the programs that hold no secret
	AuditDir      string // audit log of kube-apiserver
	SecretsDir    string // boot.SecretsDir
	CNIConfDir    string // boot.CNIConfDir
	SubnetFile    string // flannel's
	KubeletURL    string
}

const (
	filesDir   = "/etc/kubernetes"
	auditDir   = boot.LogDir + "/audit/kube" // made with the other directories of EPHEMERAL
	subnetFile = "/run/flannel/subnet.env"
	kubeletURL = "https://127.0.0.1:10250"
)

// Controllers are the controllers of this package.
func Controllers(o Options) []resource.Controller {
	for _, option := range []struct {
		to    *string
		value string
	}{
		{&o.StaticPodsDir, boot.StaticPodsDir}, {&o.FilesDir, filesDir}, {&o.AuditDir, auditDir}, {&o.SecretsDir, boot.SecretsDir},
		{&o.CNIConfDir, boot.CNIConfDir}, {&o.SubnetFile, subnetFile}, {&o.KubeletURL, kubeletURL},
	} {
		if *option.to == "" {
			*option.to = option.value
		}
	}
	return []resource.Controller{
		{
			Name: "v1alpha1.BootstrapStatusController", Reconcile: (&BootstrapStatusController{}).Reconcile,
			Inputs:  []resource.Input{{Type: machine.Configs.Type(), ID: machine.ConfigID}},
			Outputs: []string{BootstrapStatuses.Type()},
		},
		{
			Name: "config.KubernetesControlPlaneController", Reconcile: (&ConfigController{}).Reconcile,
			Inputs:  []resource.Input{{Type: machine.Configs.Type(), ID: machine.ConfigID}},
			Outputs: []string{Configs.Type()},
		},
		{
			Name: "k8s.ControlPlaneStaticPodController", Reconcile: (&StaticPodController{filesDir: o.FilesDir, auditDir: o.AuditDir, secretsDir: filepath.Join(o.SecretsDir, "kubernetes")}).Reconcile,
			Inputs: []resource.Input{
				{Type: Configs.Type()}, {Type: secrets.Statuses.Type()}, {Type: etcd.Statuses.Type()}, {Type: network.Addresses.Type()},
				{Type: machine.Configs.Type(), ID: machine.ConfigID},
			},
			Outputs: []string{StaticPods.Type()},
		},
		{
			Name: "k8s.KubeletStaticPodController", Reconcile: (&KubeletStaticPodController{staticPodsDir: o.StaticPodsDir, filesDir: o.FilesDir, kubeletURL: o.KubeletURL}).Reconcile,
			Inputs:  []resource.Input{{Type: StaticPods.Type()}, {Type: Configs.Type(), ID: apiServer}, {Type: secrets.Kubernetes.Type()}, {Type: network.Hostnames.Type()}},
			Outputs: []string{StaticPodStatuses.Type()},
		},
		{
			Name: "k8s.ManifestController", Reconcile: (&ManifestController{}).Reconcile,
			Inputs:  []resource.Input{{Type: machine.Configs.Type(), ID: machine.ConfigID}, {Type: network.Resolvers.Type()}},
			Outputs: []string{BootstrapManifests.Type()},
		},
		{
			Name: "k8s.ManifestApplyController", Reconcile: (&ManifestApplyController{}).Reconcile,
			Inputs: []resource.Input{
				{Type: BootstrapManifests.Type()}, {Type: BootstrapStatuses.Type()}, {Type: etcd.Statuses.Type()},
				{Type: secrets.Kubernetes.Type()}, {Type: secrets.Etcd.Type()},
			},
		},
		{
			Name: "k8s.ManifestDriftController", Reconcile: (&ManifestDriftController{}).Reconcile,
			Inputs: []resource.Input{
				{Type: BootstrapManifests.Type()}, {Type: BootstrapStatuses.Type()}, {Type: etcd.Statuses.Type()}, {Type: secrets.Kubernetes.Type()},
			},
			Outputs: []string{ManifestDrifts.Type()},
		},
		{
			Name: "k8s.NodeLabelController", Reconcile: (&NodeLabelController{printf: o.Logs.Printf, kubeletClient: boot.KubeletClient}).Reconcile,
			Inputs: []resource.Input{
				{Type: machine.Configs.Type(), ID: machine.ConfigID}, {Type: network.Hostnames.Type()}, {Type: secrets.Kubernetes.Type()}, {Type: StaticPodStatuses.Type()},
			},
		},
		{
			Name: "k8s.ServingApprovalController", Reconcile: (&ServingApprovalController{}).Reconcile,
			Inputs: []resource.Input{{Type: secrets.Kubernetes.Type(), ID: secrets.KubernetesID}},
		},
		{
			Name: "k8s.NodeLeaveController", Reconcile: (&NodeLeaveController{}).Reconcile,
			Inputs: []resource.Input{{Type: secrets.Kubernetes.Type(), ID: secrets.KubernetesID}},
		},
		{
			Name: "k8s.CNIConfigController", Reconcile: (&CNIConfigController{confDir: o.CNIConfDir, subnetFile: o.SubnetFile}).Reconcile,
			Inputs: []resource.Input{{Type: machine.Configs.Type(), ID: machine.ConfigID}},
		},
	}
}

// soon is when to look again for something that will come by itself within
// seconds: short enough not to be felt in the start of a cluster.
const soon = 250 * time.Millisecond

// ignoreNotFound is for what somebody else will publish: the change wakes us.
func ignoreNotFound(err error) error {
	if errors.Is(err, resource.ErrNotFound) {
		return nil
	}
	return err
}
