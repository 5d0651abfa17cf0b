//go:build e2e

package onenode

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// chartPaths are what common charts mount from nodes, by the type of the volume.
var chartPaths = map[string][]string{
	"Directory": {
		"/boot", "/dev", "/etc/kubernetes", "/etc/kubernetes/manifests", "/etc/pki", "/etc/ssl/certs", "/lib/modules", "/proc", "/proc/sys/net", "/run/udev",
		"/sys/class/net", "/usr/lib", "/usr/share/ca-certificates", "/usr/src", "/var/lib/containerd", "/var/lib/docker/containers", "/var/lib/kubelet/device-plugins",
		"/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/pods", "/var/log", "/var/log/audit/kube", "/var/log/pods", "/var/run/containerd",
	},
	"DirectoryOrCreate": {
		"/data/site", "/etc/cdi", "/etc/cni/net.d", "/etc/iscsi", "/etc/modules-load.d", "/home/site", "/mnt/disks", "/opt/cni/bin", "/opt/local-path-provisioner",
		"/srv/site", "/tmp/x", "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/site~driver", "/var/lib/calico", "/var/lib/kubelet/plugins/x.csi.example.org",
		"/var/lib/rook", "/var/run/cdi", "/var/run/cilium",
	},
	"File":         {"/etc/hostname", "/etc/hosts", "/etc/localtime", "/etc/machine-id", "/etc/os-release", "/etc/resolv.conf", "/etc/timezone"},
	"FileOrCreate": {"/run/xtables.lock"},
	"Socket":       {"/run/containerd/containerd.sock"},
}

// mounts: a pod that mounts all that charts do starts, and what it makes is where the table of docs/host-paths.md says.
func mounts(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	var volumes, places strings.Builder
	for kind, paths := range chartPaths {
		for i, path := range paths {
			id := fmt.Sprintf("%s-%d", strings.ToLower(kind), i)
			fmt.Fprintf(&volumes, "  - {name: %s, hostPath: {path: %q, type: %s}}\n", id, path, kind)
			fmt.Fprintf(&places, "    - {name: %s, mountPath: /node/%[1]s}\n", id)
		}
	}
	const pod = "host-paths"
	c.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: kube-system}
spec:
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  containers:
  - name: all
    image: %s
    command: [/usr/local/bin/kubectl, proxy, --port=8001]
    volumeMounts:
%s  volumes:
%s`, pod, config.DefaultAPIServerImage, places.String(), volumes.String()))
	c.Eventually(podsBudget, "a pod with the paths of charts runs", func() error {
		phase := c.Kubectl("-n", "kube-system", "get", "pod", pod, "-o", "jsonpath={.status.phase}")
		if phase == "Running" {
			return nil
		}
		return errors.New(phase + ": " + c.Kubectl("-n", "kube-system", "get", "events", "--field-selector", "involvedObject.name="+pod, "-o", "jsonpath={.items[*].message}"))
	})
	for _, path := range []string{
		"/var/data/site", "/var/home/site", "/var/mnt/disks", "/var/opt/local-path-provisioner", "/var/srv/site", "/etc/kubernetes/volumeplugins/site~driver",
		"/var/run/cilium", "/run/cdi",
	} {
		if _, err := c.TryGbctl("-n", c.Node(), "ls", path); err != nil {
			t.Errorf("what a pod has made isn't in %s: %v", path, err)
		}
	}
	if plugins := c.Gbctl("-n", c.Node(), "ls", "/opt/cni/bin"); !strings.Contains(plugins, "bridge") {
		t.Errorf("the CNI plugins of the image aren't in /opt/cni/bin:\n%s", plugins)
	}
	c.Kubectl("-n", "kube-system", "delete", "pod", pod, "--wait=true")
}
