package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	configFile      = "/etc/kubernetes/kubelet.yaml"
	secretsDir      = boot.SecretsDir + "/" + secrets.KubeletID // written there by package secrets
	caFile          = secretsDir + "/ca.crt"
	servingCertFile = secretsDir + "/serving.crt"
	servingKeyFile  = secretsDir + "/serving.key"
	kubeconfig      = boot.KubeletDir + "/kubeconfig" // written once there is a certificate
	clientFile      = boot.KubeletClient
	// servingFile is the certificate that the kubelet of a worker gets from the cluster.
	servingFile = boot.KubeletDir + "/pki/kubelet-server-current.pem"
	// maxFile bounds what is read of a certificate or of a static pod.
	maxFile = 1 << 20
)

// prepare writes what the kubelet reads only at its start, and restores what it checks then.
// It reports whether the kubelet has a certificate: it doesn't start without one.
func (o Options) prepare() (has bool, err error) {
	cfg, err := machine.Config(o.Store)
	if err != nil {
		return has, err
	}
	s, err := secrets.Kubelet.Get(o.Store, secrets.KubeletID)
	if err != nil {
		return has, err
	}
	if protectsKernel(o.Mode, cfg) {
		if err := restoreKernelDefaults(sysctlDir); err != nil {
			return has, err
		}
	}
	for _, d := range directories {
		if err := untrusted.MkdirAll(d.path, d.mode); err != nil {
			return has, err
		}
	}
	if err := checkpoints(cfg.SelfHosted(), boot.SelfHostedFile, boot.CheckpointsDir, boot.StaticPodsDir); err != nil {
		return has, err
	}
	for _, v := range cfg.Machine.Kubelet.ExtraMounts {
		// What is there, a file or a socket perhaps, stays as it is.
		if _, err := untrusted.Stat(v.HostPath); errors.Is(err, fs.ErrNotExist) {
			if err := untrusted.MkdirAll(v.HostPath, 0o755); err != nil {
				return has, fmt.Errorf("machine.kubelet.extraMounts: %w", err)
			}
		}
	}
	if has, err = o.hasCertificate(s.Spec); err != nil {
		return has, err
	}
	files, err := files(o.Mode, cfg)
	if err != nil {
		return has, err
	}
	for _, f := range files {
		if f.path == kubeconfig && !has {
			continue
		}
		if err := untrusted.WriteFile(f.path, f.data, f.perm); err != nil {
			return has, err
		}
	}
	return has, nil
}

type file struct {
	path string
	data []byte
	perm os.FileMode
}

// files are the kubelet's configuration, and how it reaches the API.
func files(mode boot.Mode, c *config.Config) ([]file, error) {
	var all []file
	for _, f := range []struct {
		path    string
		content object
	}{
		{configFile, configuration(mode, c)},
		{kubeconfig, kubeconfigFor(c, object{"client-certificate": clientFile, "client-key": clientFile})},
	} {
		data, err := yaml.Marshal(f.content)
		if err != nil {
			return nil, fmt.Errorf("render %s: %w", f.path, err)
		}
		all = append(all, file{f.path, data, 0o600})
	}
	return all, nil
}

// hasCertificate reports whether the kubelet has a certificate, after giving it the one that
// a control plane makes.
func (o Options) hasCertificate(s secrets.KubeletSpec) (bool, error) {
	if len(s.Client.Crt) > 0 {
		return true, writeClient(s)
	}
	name, err := network.Hostnames.Get(o.Store, network.HostnameID)
	if err != nil {
		return false, err
	}
	if err := forgetOther(name.Spec, s, clientFile, kubeconfig); err != nil {
		return false, err
	}
	if err := forgetFormer(s, servingFile); err != nil {
		return false, err
	}
	return untrusted.Exists(clientFile), nil
}

// writeClient gives the kubelet its first certificate, in the place and form in
// which it keeps those that it renews itself. What is there and still good stays.
func writeClient(s secrets.KubeletSpec) error {
	if have, err := untrusted.ReadLinked(clientFile, maxFile); err != nil || !stillGood(have, s, time.Now()) {
		pair := slices.Concat(s.Client.Crt, config.PEM(s.Client.Key))
		return untrusted.WriteFile(clientFile, pair, 0o600)
	}
	return nil
}

// stillGood is whether a certificate of an earlier boot is for this node, in this
// cluster, and valid now.
func stillGood(have []byte, s secrets.KubeletSpec, now time.Time) bool {
	old, err := pki.ParseCert(have)
	if err != nil {
		return false
	}
	fresh, err := pki.ParseCert(s.Client.Crt)
	if err != nil {
		return false
	}
	ca, err := pki.ParseCert(s.Issuing)
	return err == nil && old.CheckSignatureFrom(ca) == nil &&
		old.Subject.CommonName == fresh.Subject.CommonName && now.After(old.NotBefore) && now.Before(old.NotAfter)
}

// object is a Kubernetes configuration object in its YAML form.
type object = map[string]any

// configuration is KubeletConfiguration, kubelet.config.k8s.io/v1beta1.
func configuration(mode boot.Mode, c *config.Config) object {
	k := object{
		"apiVersion":         "kubelet.config.k8s.io/v1beta1",
		"kind":               "KubeletConfiguration",
		"staticPodPath":      boot.StaticPodsDir,
		"address":            listenAddress(c),
		"healthzBindAddress": "127.0.0.1",
		"healthzPort":        10248,
		"authentication": object{
			"anonymous": object{"enabled": false},
			"webhook":   object{"enabled": true},
			"x509":      object{"clientCAFile": caFile},
		},
		// The default keeps a refusal for 30 s: the node's own first question about its
		// static pods comes before the role binding that allows it.
		"authorization":            object{"mode": "Webhook", "webhook": object{"cacheUnauthorizedTTL": "1s"}},
		"rotateCertificates":       true,
		"tlsMinVersion":            "VersionTLS13",
		"clusterDomain":            c.Cluster.Network.DNSDomain,
		"clusterDNS":               c.Machine.Kubelet.ClusterDNS,
		"resolvConf":               "/etc/resolv.conf",
		"containerRuntimeEndpoint": "unix://" + containerd.Socket,
		"imageServiceEndpoint":     "unix://" + containerd.ImageSocket,
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/",
		"systemCgroups":            "",
		// Not below /var: what a pod has put there would run as root after the next boot, too.
		"volumePluginDir":     "/etc/kubernetes/volumeplugins",
		"serializeImagePulls": false,
		"logging":             object{"format": "json"},
		// Static pods are files that PID 1 writes; inotify tells the kubelet at once,
		// this is only the fallback.
		"fileCheckFrequency": "5s",
		"podPidsLimit":       podPidsLimit,
		// The default of 5 minutes would show a network that came up late.
		"nodeStatusReportFrequency": "1m",
		"nodeStatusUpdateFrequency": "5s",
	}
	if taints := registerWithTaints(c); len(taints) > 0 {
		k["registerWithTaints"] = taints
	}
	if c.Machine.Type.ControlPlane() {
		k["tlsCertFile"], k["tlsPrivateKeyFile"] = servingCertFile, servingKeyFile
	} else {
		// Signed by the cluster's CA, and renewed; see ApprovalController.
		k["serverTLSBootstrap"] = true
	}
	if mode == boot.Container {
		// The disk belongs to the host, whose fill level is not this node's doing,
		// and hosts with cgroup v1 are still about.
		k["failCgroupV1"] = false
		k["imageGCHighThresholdPercent"] = 100
		k["evictionHard"] = object{"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%"}
		k["failSwapOn"] = false
	}
	k["protectKernelDefaults"] = protectsKernel(mode, c)
	return k
}

// podPidsLimit is how many processes and threads a pod may have. The smallest machine
// that is supported, with 1 GiB of memory, has room for 8192 (kernel.threads-max): a pod
// that forks without end leaves half of them to the node and to other pods.
const podPidsLimit = 4096

// sysctlDir is where the kernel has its parameters.
const sysctlDir = "/proc/sys"

// restoreKernelDefaults is for what a privileged pod has changed since boot: the kubelet
// would not start again.
func restoreKernelDefaults(dir string) error {
	for _, s := range boot.KubeletParameters {
		path := filepath.Join(dir, s.Name)
		if have, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(have)) == s.Value {
			continue
		}
		if err := os.WriteFile(path, []byte(s.Value), 0); err != nil {
			return fmt.Errorf("set a kernel parameter that the kubelet demands: %w", err)
		}
	}
	return nil
}

// protectsKernel reports whether the kubelet checks these parameters: on machines, and if
// machine.sysctls has no other value for one of them, with which the kubelet would not start.
func protectsKernel(mode boot.Mode, c *config.Config) bool {
	if mode == boot.Container { // they are the host's
		return false
	}
	for name, value := range c.Machine.Sysctls {
		path := config.SysctlPath(name)
		differs := func(s boot.Setting) bool { return s.Name == path && s.Value != value }
		if slices.ContainsFunc(boot.KubeletParameters, differs) {
			return false
		}
	}
	return true
}

// registerWithTaints is what keeps pods away from the node from its first moment on.
func registerWithTaints(c *config.Config) (taints []object) {
	all := c.Taints()
	for _, key := range slices.Sorted(maps.Keys(all)) {
		taint := object{"key": key, "effect": all[key].Effect}
		if value := all[key].Value; value != "" {
			taint["value"] = value
		}
		taints = append(taints, taint)
	}
	return taints
}

// listenAddress is that of all of a node's addresses: "::" accepts IPv4 too, and needs IPv6 in the kernel.
func listenAddress(c *config.Config) string {
	if c.Cluster.Network.IPv6() {
		return "::"
	}
	return "0.0.0.0"
}

// kubeconfigFor is a kubeconfig for the node's balancer.
func kubeconfigFor(c *config.Config, user object) object {
	at := object{"server": balancer.URL, "tls-server-name": balancer.ServerName, "certificate-authority": caFile}
	return config.KubeconfigOf(c.Cluster.Name, at, "kubelet", user)
}

// commandLine is what isn't in the configuration file; extra arguments of the
// configuration win.
func commandLine(c *config.Config, hostname string, ips []netip.Addr) []string {
	flags := map[string]string{
		"config":            configFile,
		"kubeconfig":        kubeconfig,
		"cert-dir":          boot.KubeletDir + "/pki",
		"root-dir":          boot.KubeletDir,
		"hostname-override": hostname,
		"node-ip":           config.Joined(ips, ","),
		// Pods without a profile of their own run under the container runtime's. Not in the
		// configuration file: no flag turns off there what is on in it.
		"seccomp-default": "true",
	}
	if labels := c.Machine.Kubelet.NodeLabels; len(labels) > 0 {
		pairs := make([]string, 0, len(labels))
		for _, key := range slices.Sorted(maps.Keys(labels)) {
			pairs = append(pairs, key+"="+labels[key])
		}
		flags["node-labels"] = strings.Join(pairs, ",")
	}
	return containerd.CommandLine("kubelet", flags, c.Machine.Kubelet.ExtraArgs)
}
