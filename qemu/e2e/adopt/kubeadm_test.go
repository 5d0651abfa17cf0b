//go:build e2e && long

package adopt

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// old is a control plane made by kubeadm itself: its files, keys, static pods
// and objects. There is no kubelet: the programs of the static pods run
// directly, with the command lines of their static pods, in a directory that is
// their root.
type old struct {
	t       *testing.T
	root    string
	address netip.Addr
	network *osthread.Thread
	pods    map[string]*exec.Cmd
}

const (
	oldName    = "old"
	kubeadmYML = "/etc/kubeadm.yaml"
	adminConf  = "/etc/kubernetes/admin.conf"
	// oldBudget is for etcd and kube-apiserver to serve on an empty directory.
	oldBudget = 40 * time.Second
	// grace is the time that a kubelet gives a static pod to end, before it kills
	// it. An API server with open watches takes a minute.
	grace = 30 * time.Second
)

// kubeadmConfig is a usual one, except that it has the versions that were
// built, and the only mode of kube-proxy for which its image has the tools.
const kubeadmConfig = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {advertiseAddress: %[1]s, bindPort: 6443}
nodeRegistration: {name: %[2]s, criSocket: "unix:///run/containerd/containerd.sock"}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
clusterName: kubernetes
kubernetesVersion: %[4]s
controlPlaneEndpoint: %[3]s:6443
networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.96.0.0/12, dnsDomain: cluster.local}
dns: {imageTag: %[5]s}
etcd: {local: {imageTag: %[6]s}}
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
`

// newOld makes the files of a control plane and starts nothing.
func newOld(t *testing.T, made *image.Artifacts, address, endpoint netip.Addr) *old {
	t.Helper()
	o := &old{t: t, root: t.TempDir(), address: address, pods: map[string]*exec.Cmd{}}
	for _, dir := range []string{"usr/local/bin", "tmp", "var/log", "etc"} {
		if err := os.MkdirAll(filepath.Join(o.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []struct{ from, to string }{
		{buildKubeadm(t), "kubeadm"},
		{made.Components["kubernetes"] + "/kubernetes", "kubernetes"},
		{made.Components["etcd"] + "/etcd", "etcd"},
	} {
		o.put(file.from, file.to)
	}
	for link, to := range map[string]string{"kube-apiserver": "kubernetes", "kube-controller-manager": "kubernetes", "kube-scheduler": "kubernetes", "etcdctl": "etcd"} {
		if err := os.Symlink(to, filepath.Join(o.root, "usr/local/bin", link)); err != nil {
			t.Fatal(err)
		}
	}
	text := fmt.Sprintf(kubeadmConfig, address, oldName, endpoint, config.KubernetesVersion, config.CoreDNSVersion, config.EtcdVersion)
	for path, text := range map[string]string{kubeadmYML: text, "/etc/hosts": "127.0.0.1 localhost\n"} {
		if err := os.WriteFile(o.path(path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, phase := range []string{"certs all", "kubeconfig all", "etcd local", "control-plane all"} {
		o.phase(phase)
	}
	return o
}

// put gives the machine a program. A second name is a link, if possible.
func (o *old) put(from, name string) {
	o.t.Helper()
	to := filepath.Join(o.root, "usr/local/bin", name)
	if os.Link(from, to) == nil {
		return
	}
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err != nil {
		o.t.Fatal(err)
	}
}

func (o *old) path(inside string) string { return filepath.Join(o.root, inside) }

// buildKubeadm builds the program of the version that Garboard runs.
func buildKubeadm(t *testing.T) string {
	t.Helper()
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = "kubeadm"
		// With the settings of the components, so that common packages are compiled once.
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	if v := run("list", "-m", "-f={{.Version}}", "k8s.io/kubernetes"); v != config.KubernetesVersion {
		t.Fatalf("kubeadm/go.mod has Kubernetes %s, Garboard %s", v, config.KubernetesVersion)
	}
	out, err := filepath.Abs("../../../out/kubeadm")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(strings.TrimPrefix(config.KubernetesVersion, "v"), ".")
	const version = "k8s.io/component-base/version."
	run("build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -X "+version+"gitVersion="+config.KubernetesVersion+
		" -X "+version+"gitMajor="+parts[0]+" -X "+version+"gitMinor="+parts[1], "-o", out, "k8s.io/kubernetes/cmd/kubeadm")
	return out
}

// command is a program on the machine.
func (o *old) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command("/usr/local/bin/"+program, args...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/bin", "HOME=/tmp"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: o.root, Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (o *old) start(cmd *exec.Cmd) error {
	if o.network == nil {
		return cmd.Start()
	}
	return o.network.Do(cmd.Start)
}

// run runs a program to its end.
func (o *old) run(program string, args ...string) (string, error) {
	cmd := o.command(program, args...)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := o.start(cmd); err != nil {
		return "", err
	}
	if err := cmd.Wait(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s%s", program, strings.Join(args, " "), err, out.String(), complaints.String())
	}
	return out.String(), nil
}

func (o *old) phase(name string) {
	o.t.Helper()
	if _, err := o.run("kubeadm", append(append([]string{"init", "phase"}, strings.Fields(name)...), "--config="+kubeadmYML)...); err != nil {
		o.t.Fatal(err)
	}
}

// serve starts the control plane in a network, and runs kubeadm's phases that
// make its objects.
func (o *old) serve(network *osthread.Thread) {
	o.t.Helper()
	o.network = network
	files, err := filepath.Glob(o.path("/etc/kubernetes/manifests/*.yaml"))
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() {
		for _, cmd := range o.pods {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	for _, file := range files {
		o.startPod(file)
	}
	eventually.That(o.t, oldBudget, "the control plane of kubeadm is ready", func() error {
		_, err := o.kubectl("get", "--raw", "/readyz")
		return err
	})
	for _, phase := range []string{"upload-config kubeadm", "bootstrap-token", "addon all"} {
		o.phase(phase)
	}
}

// kubectl runs on the machine itself, as root would there. The program is a
// multi-call binary.
func (o *old) kubectl(args ...string) (string, error) {
	kubeconfig := "--kubeconfig=/etc/kubernetes/super-admin.conf"
	cmd := o.command("kubernetes", append([]string{kubeconfig, "--server=https://" + o.address.String() + ":6443"}, args...)...)
	cmd.Args[0] = "kubectl"
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := o.start(cmd); err != nil {
		return "", err
	}
	if err := cmd.Wait(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return out.String(), nil
}

// startPod does the part of the kubelet.
func (o *old) startPod(file string) {
	o.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		o.t.Fatal(err)
	}
	var pod struct {
		Spec struct {
			Containers []struct{ Command []string }
		}
	}
	if err := yaml.Unmarshal(text, &pod); err != nil || len(pod.Spec.Containers) != 1 {
		o.t.Fatalf("%s: %v, %d containers", file, err, len(pod.Spec.Containers))
	}
	command := pod.Spec.Containers[0].Command
	cmd := o.command(command[0], command[1:]...)
	log, err := os.Create(o.path("/var/log/" + command[0] + ".log"))
	if err != nil {
		o.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := o.start(cmd); err != nil {
		o.t.Fatal(err)
	}
	o.pods[command[0]] = cmd
}

// end ends a static pod as a kubelet does.
func (o *old) end(name string) {
	o.t.Helper()
	cmd := o.pods[name]
	delete(o.pods, name)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		o.t.Error(err)
	}
	select {
	case <-ended:
		return
	case <-time.After(grace):
	}
	if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		o.t.Error(err)
	}
	<-ended
}

// log is the end of a program's log, for the message of a failed test.
func (o *old) log(name string) string {
	text, err := os.ReadFile(o.path("/var/log/" + name + ".log"))
	if err != nil {
		return err.Error()
	}
	const end = 4 << 10
	return string(text[max(0, len(text)-end):])
}
