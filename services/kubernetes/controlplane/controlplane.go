// Package controlplane runs Kubernetes' control plane as static pods, and makes
// the first objects of a new cluster.
//
// The machine configuration is the only source. Controllers turn it into files
// that the kubelet watches, and keep them up to date:
//
//	MachineConfigs ──────────────────────────────┬→ KubernetesControlPlaneConfigs (for users)
//	SecretsStatuses (content hash), EtcdStatuses ┴→ StaticPods ─→ /etc/kubernetes/manifests ─→ kubelet
//	                                                              StaticPodStatuses ←───────────┘
//	MachineConfigs ─→ Manifests (bootstrap manifests) ─→ API server: what is missing is made, nothing is ever changed
//	                  ManifestResults ←──────────────────────┤ what isn't there, and why
//	                  ManifestDrifts ←───────────────────────┘ what differs there
//
// It has no part in scheduling or other work of Kubernetes itself.
package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// Namespaces of the resources here.
const (
	namespace       = "controlplane"
	configNamespace = "config"
	extrasNamespace = "extras"
	kubeSystem      = "kube-system" // the cluster's namespace of Kubernetes itself
)

// Programs of the control plane, which are also the names of their pods and of
// their configurations.
const (
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
)

// Programs are all of them.
var Programs = []string{apiServer, controllerManager, scheduler}

// StaticPods are the pods that the kubelet runs from files: the spec is
// the pod.
var StaticPods = resource.Define[kubeclient.Object](resource.Definition{
	Type: "StaticPods.kubernetes.garboard.dev", Kind: "StaticPod", Namespace: namespace,
})

// StaticPodStatuses are the kubelet's reports about them; the ID is
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

// ConfigVersion is the key, beside those of Kubernetes, under which PodStatus has the
// version of the KubernetesControlPlaneConfig that the pod was made of.
const ConfigVersion = "configVersion"

// SecretsVersion is the key for the version of the secrets (secrets.StatusSpec) that the pod
// was made of.
const SecretsVersion = "secretsVersion"

// Lacks is the key for why the pod isn't replaced by one with the present configuration: a reason and a message.
const Lacks = "lacks"

// PodStatus is a pod's status as the kubelet has it, with ConfigVersion, SecretsVersion and Lacks.
type PodStatus kubeclient.Object

// Ready is the pod's own condition.
func (s PodStatus) Ready() bool {
	return kubeclient.Object{"status": map[string]any(s)}.Condition("Ready")
}

// Unready says of each program of the control plane that isn't ready with its present
// configuration what it is; none on a worker, before there is a cluster, and while it is
// self-hosted: the static pods only show what the node would run.
func Unready(r resource.Reader) (reasons []string) {
	if SelfHosted(r) {
		return nil
	}
	wanted := map[string]ProgramConfig{}
	if c, err := controlPlaneConfig(r); err == nil && c != nil {
		for _, spec := range programConfigs(&c.Cluster) {
			wanted[spec.program()] = spec
		}
	}
	for _, pod := range StaticPods.List(r) {
		version := "0"
		if c, err := Configs.Get(r, pod.ID); err == nil {
			version = strconv.FormatUint(c.Version, 10)
			if want := wanted[pod.ID]; want != nil && !reflect.DeepEqual(c.Spec, want) {
				reasons = append(reasons, fmt.Sprintf("static pod %s: the node hasn't taken over its configuration yet", pod.ID))
				continue
			}
		}
		why := "the kubelet doesn't have it yet"
		for _, status := range StaticPodStatuses.List(r) {
			if !strings.HasPrefix(status.ID, kubeSystem+"/"+pod.ID+"-") {
				continue
			}
			switch {
			case status.Spec[ConfigVersion] != version:
				why = cmp.Or(kubeclient.Object(status.Spec).Text(Lacks, "message"), fmt.Sprintf("runs with version %v of its configuration, and not %s", status.Spec[ConfigVersion], version))
			case !status.Spec.Ready():
				why = "isn't ready"
			default:
				why = ""
			}
		}
		if why != "" {
			reasons = append(reasons, fmt.Sprintf("static pod %s: %s", pod.ID, why))
		}
	}
	return reasons
}

// BootstrapStatus says how the control plane runs.
type BootstrapStatus struct {
	// SelfHosted: as pods of the cluster itself, as in older systems.
	SelfHosted bool `yaml:"selfHosted" column:"SELF HOSTED"`
}

// BootstrapStatuses has the one object "control-plane".
var BootstrapStatuses = resource.Define[BootstrapStatus](resource.Definition{
	Type: "BootstrapStatuses.v1alpha1.garboard.dev", Kind: "BootstrapStatus", Aliases: []string{"bs"}, Namespace: "runtime",
})

// SelfHosted reports whether the node knows that its control plane is self-hosted.
func SelfHosted(r resource.Reader) bool {
	status, err := BootstrapStatuses.Get(r, "control-plane")
	return err == nil && status.Spec.SelfHosted
}

// Options are the inputs of the controllers. Paths are for tests: "" is a node's.
type Options struct {
	Logs *logs.Logs

	StaticPodsDir string // boot.StaticPodsDir
	FilesDir      string // configuration files of the programs that hold no secret
	AuditDir      string // audit log of kube-apiserver
	SecretsDir    string // boot.SecretsDir
	CNIConfDir    string // boot.CNIConfDir
	// CheckpointsDir is boot.CheckpointsDir.
	CheckpointsDir string
	SubnetFile     string // flannel's
	KubeletURL     string
	// Have is nil once the node has an image for pods, and pulls it until then; instead goes on. nil: nobody looks.
	Have func(ctx context.Context, image, instead string) error
	// Kill ends a container of a pod at once, which the kubelet starts again.
	Kill func(ctx context.Context, container string) error
	// Roster is what etcd knows of the cluster's nodes, and Enlist records one there.
	Roster func(ctx context.Context) (roster.Facts, error)
	Enlist func(ctx context.Context, name string, r roster.Record) error
	// Initialized looks for the mark of a self-hosted control plane in etcd; nil: really.
	Initialized func(ctx context.Context, r resource.Reader, endpoint string) (bool, error)
	// Issuers records an issuer of tokens in etcd, and returns all; nil: really.
	Issuers func(ctx context.Context, r resource.Reader, member, issuer string) ([]string, error)
}

// AuditLog is the audit log of the API server. Rotated files are beside it.
const AuditLog = auditDir + "/" + apiServer + ".log"

const (
	filesDir   = "/etc/kubernetes"
	auditDir   = boot.LogDir + "/audit/kube" // made with the other directories of EPHEMERAL
	subnetFile = "/run/flannel/subnet.env"
	kubeletURL = "https://127.0.0.1:10250"
)

// Controllers are the controllers of this package.
func Controllers(o Options) []resource.Controller {
	option.Default(&o.StaticPodsDir, boot.StaticPodsDir)
	option.Default(&o.FilesDir, filesDir)
	option.Default(&o.AuditDir, auditDir)
	option.Default(&o.SecretsDir, boot.SecretsDir)
	option.Default(&o.CNIConfDir, boot.CNIConfDir)
	option.Default(&o.CheckpointsDir, boot.CheckpointsDir)
	option.Default(&o.SubnetFile, subnetFile)
	option.Default(&o.KubeletURL, kubeletURL)
	option.Default(&o.Initialized, initialized)
	option.Default(&o.Issuers, recordIssuer)
	return []resource.Controller{
		{
			Name: "v1alpha1.BootstrapStatusController", Reconcile: (&BootstrapStatusController{initialized: o.Initialized}).Reconcile,
			Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: etcd.Statuses.Type()}, {Type: secrets.Etcd.Type()}},
			Outputs: []string{BootstrapStatuses.Type()},
		},
		{
			Name: "k8s.ControlPlaneStaticPodController", Reconcile: (&StaticPodController{filesDir: o.FilesDir, auditDir: o.AuditDir, secretsDir: filepath.Join(o.SecretsDir, "kubernetes")}).Reconcile,
			Inputs: []resource.Input{
				{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: secrets.Statuses.Type()}, {Type: etcd.Statuses.Type()},
				{Type: network.Addresses.Type()}, {Type: secrets.Issuers.Type()},
			},
			Outputs: []string{Configs.Type(), StaticPods.Type()},
		},
		{
			Name: "k8s.ServiceAccountIssuerController", Reconcile: (&IssuerController{record: o.Issuers}).Reconcile,
			Inputs:  []resource.Input{{Type: Configs.Type(), ID: apiServer}, {Type: etcd.Statuses.Type()}, {Type: secrets.Etcd.Type()}},
			Outputs: []string{secrets.Issuers.Type()},
		},
		{
			Name: "k8s.KubeletStaticPodController", Reconcile: (&KubeletStaticPodController{staticPodsDir: o.StaticPodsDir, filesDir: o.FilesDir, checkpointsDir: o.CheckpointsDir, kubeletURL: o.KubeletURL, have: o.Have, kill: o.Kill}).Reconcile,
			// the pods are made from the configuration, and follow it
			Inputs:  []resource.Input{{Type: StaticPods.Type()}, {Type: BootstrapStatuses.Type()}, {Type: configuration.Configs.Type(), ID: configuration.ConfigID, Quiet: true}, {Type: secrets.Kubernetes.Type()}, {Type: network.Hostnames.Type()}, {Type: etcd.Statuses.Type()}},
			Outputs: []string{StaticPodStatuses.Type()},
		},
		{
			Name: "k8s.ManifestController", Reconcile: (&ManifestController{}).Reconcile, Leisurely: true,
			Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: network.Resolvers.Type()}},
			Outputs: []string{BootstrapManifests.Type()},
		},
		{
			Name: "k8s.ManifestApplyController", Reconcile: (&ManifestApplyController{}).Reconcile,
			Inputs: []resource.Input{
				{Type: BootstrapManifests.Type()}, {Type: BootstrapStatuses.Type()}, {Type: etcd.Statuses.Type()},
				{Type: secrets.Kubernetes.Type()}, {Type: secrets.Etcd.Type()},
			},
			Outputs: []string{ManifestResults.Type()},
		},
		{
			Name: "k8s.ManifestDriftController", Reconcile: (&ManifestDriftController{}).Reconcile,
			Inputs: []resource.Input{
				{Type: BootstrapManifests.Type()}, {Type: BootstrapStatuses.Type()}, {Type: etcd.Statuses.Type()}, {Type: secrets.Kubernetes.Type()},
				{Type: ManifestResults.Type()}, // what is missing was made
			},
			Outputs: []string{ManifestDrifts.Type()},
		},
		{
			Name: "k8s.NodeLabelController", Reconcile: (&NodeLabelController{
				roster: o.Roster, enlist: o.Enlist, printf: o.Logs.Printf, kubeletClient: boot.KubeletClient, machineID: boot.MachineIDFile,
			}).Reconcile, Leisurely: true,
			Inputs: []resource.Input{
				{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: network.Hostnames.Type()}, {Type: secrets.Kubernetes.Type()}, {Type: StaticPodStatuses.Type()},
				{Type: secrets.API.Type()},
			},
		},
		{
			Name: "k8s.CertificateApprovalController", Reconcile: (&ApprovalController{roster: o.Roster, enlist: o.Enlist}).Reconcile,
			Inputs: []resource.Input{
				{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: secrets.Kubernetes.Type(), ID: secrets.KubernetesID}, {Type: BootstrapStatuses.Type()},
			},
		},
		{
			Name: "k8s.NodeLeaveController", Reconcile: (&NodeLeaveController{roster: o.Roster}).Reconcile,
			Inputs: []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: secrets.Kubernetes.Type(), ID: secrets.KubernetesID}},
		},
		{
			Name: "k8s.CNIConfigController", Reconcile: (&CNIConfigController{confDir: o.CNIConfDir, subnetFile: o.SubnetFile}).Reconcile,
			Inputs: []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}},
		},
	}
}

// soon is the pause before another look at something that will happen within
// seconds: short enough not to delay the start of a cluster.
const soon = 250 * time.Millisecond
