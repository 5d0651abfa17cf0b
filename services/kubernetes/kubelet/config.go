package kubelet

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/render"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
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

	configMode = 0o600
)

// prepare writes what the kubelet reads only at its start, and restores what it checks then.
// It reports whether the kubelet has a certificate: it doesn't start without one.
func (o Options) prepare() (has bool, err error) {
	cfg, err := configuration.Config(o.Store)
	s, none := secrets.Kubelet.Get(o.Store, secrets.KubeletID)
	if err = cmp.Or(err, none); err != nil {
		return has, err
	}
	if protectsKernel(o.Mode, cfg) {
		if err := restoreKernelDefaults(sysctlDir); err != nil {
			return has, err
		}
	}
	for _, d := range directories {
		if err := untrusted.Reclaim(d.path, d.mode); err != nil {
			return has, err
		}
	}
	for _, path := range []string{kubeconfig, clientFile, servingFile} { // a pod may have made a directory there
		if info, err := untrusted.Stat(path); err == nil && info.IsDir() {
			_ = untrusted.RemoveAll(path) // who reads or writes the file says why that isn't possible
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
	if !has {
		delete(files, kubeconfig)
	}
	for path, text := range files {
		if err := untrusted.WriteFile(path, text, configMode); err != nil {
			return has, err
		}
	}
	return has, nil
}

// files are the kubelet's configuration, and how it reaches the API, by their paths.
func files(mode boot.Mode, c *config.Config) (map[string][]byte, error) {
	own, err := kubeletConfiguration(mode, c)
	if err != nil {
		return nil, fmt.Errorf("render %s: %w", configFile, err)
	}
	at := object{"server": balancer.URL, "tls-server-name": balancer.ServerName, "certificate-authority": caFile}
	access := config.KubeconfigOf(c.Cluster.Name, at, "kubelet", object{"client-certificate": clientFile, "client-key": clientFile})
	all := map[string][]byte{}
	for path, content := range map[string]object{configFile: own, kubeconfig: access} {
		if all[path], err = yaml.Marshal(content); err != nil {
			return nil, fmt.Errorf("render %s: %w", path, err)
		}
	}
	return all, nil
}

// hasCertificate reports whether the kubelet has a certificate, after giving it the one that
// a control plane makes.
func (o Options) hasCertificate(s secrets.KubeletSpec) (bool, error) {
	if len(s.Client.Crt) > 0 { // in the place and form in which the kubelet keeps it
		return true, untrusted.WriteFile(clientFile, slices.Concat(s.Client.Crt, config.PEM(s.Client.Key)), 0o600)
	}
	name, err := network.Hostnames.Get(o.Store, network.HostnameID)
	if err != nil {
		return false, err
	}
	err = errors.Join(forgetOther(name.Spec, s, clientFile, kubeconfig), forgetFormer(s, servingFile))
	return err == nil && untrusted.Exists(clientFile), err
}

// object is a Kubernetes configuration object in its YAML form.
type object = map[string]any

//go:embed kubelet.yaml
var configurationFile embed.FS

var configurationFiles = render.Parse(configurationFile, "kubelet.yaml")

// kubeletConfiguration is KubeletConfiguration, kubelet.config.k8s.io/v1beta1.
func kubeletConfiguration(mode boot.Mode, c *config.Config) (k object, err error) {
	all, args := c.Taints(), c.Machine.Kubelet.ExtraArgs
	taint := func(key string) object {
		t := object{"key": key, "effect": all[key].Effect, "value": all[key].Value}
		maps.DeleteFunc(t, func(_ string, v any) bool { return v == "" })
		return t
	}
	return k, configurationFiles.YAML("kubelet.yaml", object{
		"IPv6": c.Cluster.Network.IPv6(), "Resolver": c.Machine.Network.Resolver.On(), "ControlPlane": c.Machine.Type.ControlPlane(),
		"Taints":     lists.Of(slices.Sorted(maps.Keys(all)), taint),
		"OwnServing": args.Get("tls-cert-file") != "" || strings.Contains(args.Get("feature-gates"), "RotateKubeletServerCertificate=false"),
		"Config":     c, "Container": mode == boot.Container, "ProtectsKernel": protectsKernel(mode, c),
		"StaticPods": boot.StaticPodsDir, "PodResolvConf": boot.PodResolvConf, "CA": caFile, "ServingCert": servingCertFile, "ServingKey": servingKeyFile,
		"Containerd": containerd.Socket, "Images": containerd.ImageSocket,
	}, &k)
}

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
		pair := func(key string) string { return key + "=" + labels[key] }
		flags["node-labels"] = strings.Join(lists.Of(slices.Sorted(maps.Keys(labels)), pair), ",")
	}
	return c.Machine.Kubelet.ExtraArgs.CommandLine("kubelet", flags)
}
