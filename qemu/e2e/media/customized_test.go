//go:build e2e && long

package media

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// customizeBudget is for the customization of a system, and for one medium of it.
const customizeBudget = 30 * time.Second

// The Dockerfiles of the manual, built by a real Docker: a machine boots the disk image that is made of the first one's
// result, and upgrades itself to the second one's, which has another kernel. (S-200 to S-207) What a pod wrote to a
// disk of machine.disks is kept by the upgrade, and by a reset.
func TestS200CustomizedByDocker(t *testing.T) {
	docker, work := e2etest.Docker(t), t.TempDir()
	store := httptest.NewServer(registry.New())
	t.Cleanup(store.Close)
	host := strings.TrimPrefix(store.URL, "http://")
	base, _ := e2etest.Installer(t, media.Options{Args: args, Version: "v1.0.0"})
	own := host + "/garboard-os/installer"
	push(t, base, own+":v1.0.0")
	linux, usb := e2etest.OtherKernel(t, filepath.Join(work, "kernel")), "/lib/modules/"+e2etest.Linux(t)+"/kernel/drivers/usb/serial"
	e2etest.WriteFile(t, filepath.Join(work, "files/usr/share/site/hello.txt"), []byte("hello"))
	e2etest.WriteFile(t, filepath.Join(work, "greeter/extension.yaml"), []byte("name: greeter\nversion: 1.2.3\ndescription: A greeting\nfiles: [/usr/share/greeter]\n"))
	e2etest.WriteFile(t, filepath.Join(work, "greeter/files/usr/share/greeter/text"), []byte("good day"))

	build := func(tag, dockerfile string, args ...string) (string, error) {
		file := filepath.Join(work, tag+".dockerfile")
		if err := os.WriteFile(file, []byte(dockerfile), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := docker(append([]string{"build", "--file", file, "--tag", own + ":" + tag}, append(args, work)...)...)
		if err == nil {
			_, err = docker("push", own+":"+tag)
		}
		return out, err
	}
	from := "FROM " + own + ":v1.0.0\n"
	files := "FROM scratch AS customization\nCOPY files /\nCOPY greeter /extensions/greeter\n" + from
	if out, err := build("files", files, "--build-arg", "RM="+usb); err != nil {
		t.Fatal(err)
	} else if !strings.Contains(out, "added stage customization: 1 file") || !strings.Contains(out, "added extension greeter 1.2.3: ") {
		t.Errorf("docker build says:\n%s", out)
	}
	if _, err := build("linux", "FROM scratch\nCOPY kernel /\n"); err != nil {
		t.Fatal(err)
	}
	modules := "FROM scratch AS customization\nCOPY --from=" + own + ":linux /lib/modules /lib/modules\n" + from
	kernel := modules + "COPY --from=" + own + ":linux /boot/vmlinuz /usr/install/vmlinuz\n"
	if _, err := build("kernel", kernel, "--build-arg", "RM=/lib/modules", "--squash"); err != nil {
		t.Fatal(err)
	}
	// What would not boot isn't built.
	for _, c := range []struct{ dockerfile, rm, want string }{
		{files, "/nothing", "the root file system has no such path"},
		{files, "/usr/sbin/init", "/usr/sbin/init isn't there any more"},
		{modules, "", "the modules of several kernels"},
		{"FROM scratch AS customization\n" + from, "", "the stage customization has no files"},
	} {
		if _, err := build("broken", c.dockerfile, "--build-arg", "RM="+c.rm); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with RM=%s: %v, want %q", c.dockerfile, c.rm, err, c.want)
		}
	}
	// Another builder makes the same systems.
	other := buildKit(t, host)
	for tag, c := range map[string][2]string{"files": {files, "RM=" + usb}, "kernel": {kernel, "RM=/lib/modules"}} {
		if err := other(own+":other-"+tag, c[0], work, c[1]); err != nil {
			t.Fatal(err)
		}
		sameSystem(t, own+":"+tag, own+":other-"+tag)
	}
	twice(t, own+":v1.0.0", "--overlay", filepath.Join(work, "files"))
	twice(t, own+":v1.0.0", "--rm", usb)
	twice(t, own+":v1.0.0", "--kernel", filepath.Join(work, "kernel/boot/vmlinuz"), "--modules", filepath.Join(work, "kernel/lib/modules"))

	disk := filepath.Join(work, "disk")
	if system, _ := mediaOf(t, own+":files", work, "--kind", "disk="+disk); system != systemFiles(t, own+":files")["usr/install/garboard.efi"] {
		t.Errorf("the media don't have the system of the image: %s", system)
	}
	// With another kernel, the system is made anew.
	system, pxe := mediaOf(t, own+":kernel", work)
	if system == systemFiles(t, own+":kernel")["usr/install/garboard.efi"] {
		t.Error("the media have the former kernel")
	}
	vmlinuz, err := os.ReadFile(filepath.Join(pxe, media.KernelFile))
	if err != nil {
		t.Fatal(err)
	}
	if copied, err := os.ReadFile(filepath.Join(work, "kernel/boot/vmlinuz")); err != nil || !bytes.Equal(vmlinuz, copied) {
		t.Errorf("a machine that boots over the network doesn't get the kernel of the image: %v", err)
	}
	c, m := e2etest.Start(t, "customized", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.DiskGiB, o.Disks, o.Boot.Disk, o.Mirrors = diskGiB, 2, disk, map[string][]string{e2etest.InstallerHost: {store.URL}}
	})
	c.Ready(m)
	c = c.Patient(systemBudget)
	if got := c.Gbctl("-n", c.Node(), "read", "/usr/share/site/hello.txt"); got != "hello" {
		t.Errorf("the file has %q", got)
	}
	if out, err := c.TryGbctl("-n", c.Node(), "ls", usb); err == nil {
		t.Errorf("what was removed is there:\n%s", out)
	}
	if got := c.Gbctl("-n", c.Node(), "image", "provenance"); !strings.Contains(got, `"path": "/usr/share/site/hello.txt"`) || !strings.Contains(got, usb) {
		t.Errorf("provenance:\n%s", got)
	}
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", "machine: {kernel: {modules: [{name: nbd, parameters: [nbds_max=3]}]}}")
	c.Eventually(bootBudget, "the module is loaded with its parameter", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "read", "/sys/module/nbd/parameters/nbds_max")
		if err == nil && strings.TrimSpace(out) != "3" {
			err = errors.New(out)
		}
		return err
	})
	if got := c.Gbctl("-n", c.Node(), "get", "extensions"); !strings.Contains(got, "greeter") || !strings.Contains(got, "1.2.3") {
		t.Errorf("extensions:\n%s", got)
	}
	if got := c.Gbctl("-n", c.Node(), "read", "/usr/share/greeter/text"); got != "good day" {
		t.Errorf("the file of the extension has %q", got)
	}
	if got := c.Gbctl("-n", c.Node(), "image", "provenance", "--sbom"); !strings.Contains(got, `"SPDX-2.3"`) || !strings.Contains(got, `"extension greeter"`) {
		t.Errorf("the list of all software:\n%s", got)
	}
	m.Reached("the customized system runs")
	kept := writes(t, c)
	m.Reached("a pod has written to another disk")

	image := e2etest.InstallerHost + "/garboard-os/installer:kernel"
	if out, err := c.TryGbctl("-n", c.Node(), "upgrade", "--image", image); err == nil || !strings.Contains(out+err.Error(), "isn't signed") {
		t.Errorf("a system that nobody has signed: %v\n%s", err, out)
	}
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", "machine: {install: {unsigned: true}}")
	c.Gbctl("-n", c.Node(), "upgrade", "--image", image)
	if got := c.Gbctl("-n", c.Node(), "read", "/proc/version"); !strings.Contains(got, "Linux version "+linux+" ") {
		t.Errorf("the node runs %s, want Linux %s", got, linux)
	}
	if out := c.Gbctl("-n", c.Node(), "ls", "/lib/modules"); !strings.Contains(out, linux+"\n") || strings.Contains(out, e2etest.Linux(t)+"\n") {
		t.Errorf("the modules are\n%s", out)
	}
	m.Reached("the other kernel runs")
	kept()
	c.Gbctl("-n", c.Node(), "reset", "--graceful=false", "--system-labels-to-wipe", "EPHEMERAL", "--reboot", "--yes")
	kept()
	m.Reached("after a reset, the other disk has its data")
}

// mediaOf makes media of an installer image, and returns the hash of the system that all of them have. (S-206)
func mediaOf(t *testing.T, image, work string, more ...string) (system, pxe string) {
	t.Helper()
	dir := filepath.Join(work, "media", filepath.Base(image))
	uki := filepath.Join(dir, "uki")
	pxe = filepath.Join(dir, "pxe")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := e2etest.UserGbctl(t, 3*customizeBudget, append([]string{"image", "build", "--from", image, "--kind", "uki=" + uki, "--kind", "pxe=" + pxe}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{uki, filepath.Join(pxe, media.UKIFile)} {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintf("%x", sha256.Sum256(content))
		if system = cmp.Or(system, got); got != system {
			t.Errorf("%s has %s, and another medium has %s", path, got, system)
		}
	}
	return system, pxe
}

// writer writes a file with the only program of Kubernetes' images that can.
const writer = `
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: kube-system}
spec:
  tolerations: [{operator: Exists}]
  restartPolicy: Never
  containers:
  - name: writer
    image: IMAGE
    command: [/usr/local/bin/kubectl, config, set-cluster, written-by-a-pod, --kubeconfig=/data/mine]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, hostPath: {path: /var/mnt/data, type: Directory}}]
`

// writes lets a pod write to a second disk, which the node makes and for which there is a rule of udev. kept looks
// whether it is all there.
func writes(t *testing.T, c *e2etest.Cluster) (kept func()) {
	t.Helper()
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", `machine:
  udev: {rules: ['KERNEL=="vdb", SUBSYSTEM=="block", ATTR{queue/read_ahead_kb}="512", SYMLINK+="site/%k"']}
  disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/more, size: 1GiB, filesystem: ext4}, {mountpoint: /var/mnt/data}]}]`)
	says := func(want string, args ...string) {
		t.Helper()
		c.Eventually(2*bootBudget, strings.Join(args, " ")+" says "+want, func() error {
			out, err := c.TryGbctl(append([]string{"-n", c.Node()}, args...)...)
			if err == nil && !regexp.MustCompile(want).MatchString(out) {
				err = errors.New(out)
			}
			return err
		})
	}
	says(`/var/mnt/data +/dev/vdb2 +xfs`, "mounts")
	c.Apply(strings.ReplaceAll(writer, "IMAGE", config.DefaultAPIServerImage))
	kept = func() {
		t.Helper()
		says(`/var/mnt/more +/dev/vdb1 +ext4`, "mounts")
		says("written-by-a-pod", "read", "/var/mnt/data/mine")
		says("512", "read", "/sys/block/vdb/queue/read_ahead_kb")
		says("vdb", "ls", "/dev/site")
	}
	kept()
	return kept
}

// twice builds an installer image without Docker, and wants the same bytes again. (S-206)
func twice(t *testing.T, from string, flags ...string) {
	t.Helper()
	var made [2][]byte
	for i := range made {
		to := filepath.Join(t.TempDir(), "installer")
		_, err := e2etest.UserGbctl(t, customizeBudget, append([]string{"image", "build", "--from", from, "--kind", "installer=" + to}, flags...)...)
		if err != nil {
			t.Fatal(err)
		}
		if made[i], err = os.ReadFile(to); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Errorf("%v: two builds differ", flags)
	}
}

// push copies the image of a layout to a registry.
func push(t *testing.T, dir, ref string) {
	t.Helper()
	to, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err == nil {
		err = remote.Write(to, image)
	}
	if err != nil {
		t.Fatal(err)
	}
}
