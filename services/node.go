// Package services has what a node runs. The two tables in this file are the
// machine: its services with what each depends on, and its controllers. The
// packages below hold one service or one group of controllers each, and the
// generic ones (dag, resource, operation, process, logs) that know none of them by name.
package services

import (
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/trustd"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/services/system/udev"
)

// dependencies has every service of a node, and the services that must be up before it
// starts; it stops before they do. A certificate, or another fact that a service needs, is
// in its package.
var dependencies = map[string][]string{
	udev.ID:       nil,
	apid.ID:       {udev.ID},
	network.ID:    {udev.ID},
	machine.ID:    {udev.ID},
	disks.ID:      {machine.ID},
	slots.ID:      {disks.ID},
	files.ID:      {disks.ID},
	clock.ID:      {disks.ID, network.ID},
	balancer.ID:   {disks.ID, network.ID},
	resolver.ID:   {disks.ID, network.ID},
	trustd.ID:     {network.ID, clock.ID},
	containerd.ID: {disks.ID, files.ID, slots.ID},
	etcd.ID:       {containerd.ID, network.ID, clock.ID},
	kubelet.ID:    {containerd.ID, network.ID, clock.ID, balancer.ID},
	vip.ID:        {network.ID, etcd.ID},
}

// purposes has every controller of a node, and what it does.
var purposes = map[string]string{
	"config.MachineTypeController":            "the node's part in its cluster",
	"config.KubernetesControlPlaneController": "the control plane's configuration, out of the machine's",
	"v1alpha1.TimeStatusController":           "a line in the log when the time becomes synchronised, or stops being so",
	"v1alpha1.BootstrapStatusController":      "whether the control plane is self-hosted",
	"runtime.KernelModuleController":          "modules of the kernel",
	"runtime.SysfsController":                 "settings below /sys",
	"runtime.SysctlController":                "kernel parameters",
	"network.PolicyController":                "whether NetworkPolicies have an effect",
	"network.FirewallController":              "what reaches the node, and what its pods reach",
	"runtime.VolumeController":                "the partitions of machine.disks",
	"secrets.APIController":                   "the machine API's certificate",
	"secrets.EtcdController":                  "etcd's certificates",
	"secrets.KubernetesController":            "certificates and keys of the control plane and of the kubelet",
	"secrets.FilesController":                 "the files with the secrets",
	"k8s.ControlPlaneStaticPodController":     "the control plane's static pods",
	"k8s.KubeletStaticPodController":          "the static pods' files for the kubelet, and their status from it",
	"k8s.ManifestController":                  "the bootstrap manifests: what a new cluster gets first",
	"k8s.ManifestApplyController":             "the objects of bootstrap manifests that the cluster lacks",
	"k8s.ManifestDriftController":             "how the cluster's objects differ from the bootstrap manifests",
	"k8s.NodeLabelController":                 "labels and taints of the node",
	"k8s.NodeLeaveController":                 "the end of the Nodes of workers that are reset",
	"k8s.ServiceAccountIssuerController":      "the endpoints whose tokens the API server accepts",
	"k8s.CertificateApprovalController":       "the approval of the certificates of workers' kubelets",
	"k8s.NodeHealthController":                "how Kubernetes sees the node, and the node's own system pods on it",
	"k8s.CNIConfigController":                 "how containerd connects pods",
}
