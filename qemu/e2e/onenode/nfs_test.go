//go:build e2e && long

package onenode

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// nfsServer is this machine's address in the nodes' network.
	nfsServer = "10.5.0.1"
	// The servers have neither portmapper nor lock manager, so the options disable them.
	nfs3 = "vers=3, proto=tcp, mountproto=tcp, port=2049, mountport=2049, nolock"
	// With version 4.2, Ganesha 4.3 answers READ_PLUS with a hole where a small file has its text.
	nfs4 = "vers=4.1, proto=tcp, port=2050"
	// nfsExport is the path under which the server exports the folder.
	nfsExport = "/srv/shared"
	// mountBudget is for a volume to be bound and mounted, and for a pod to start.
	mountBudget = 30 * time.Second
)

// volume is a volume of the server, a claim on it, and a pod that serves its files.
const volume = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: NAME}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteMany]
  claimRef: {namespace: default, name: NAME}
  mountOptions: [OPTIONS]
  nfs: {server: ` + nfsServer + `, path: PATH}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: NAME, namespace: default}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: NAME
  resources: {requests: {storage: 1Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: NAME
    image: IMAGE
    command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8080, --accept-hosts=.*, --www=/share, --www-prefix=/share/]
    readinessProbe: {httpGet: {path: /share/greeting, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
    volumeMounts: [{name: share, mountPath: /share}]
  volumes:
  - name: share
    persistentVolumeClaim: {claimName: NAME}
`

func apply(c *e2etest.Cluster, name, path, options string) {
	c.Apply(strings.NewReplacer("NAME", name, "PATH", path, "OPTIONS", options, "IMAGE", config.DefaultAPIServerImage).Replace(volume))
}

// serveNFS3 serves folder in the nodes' network. The returned function kills the server.
func serveNFS3(t *testing.T, c *e2etest.Cluster, folder string) (kill func()) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "nfsserver")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = "nfsserver"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the NFS server: %v\n%s", err, out)
	}
	return serve(t, c, program, "-listen="+nfsServer+":2049", "-folder="+folder, "-export="+nfsExport)
}

// ganesha is the configuration of NFS-Ganesha, which serves NFS 4 without the kernel's help (man ganesha-config).
const ganesha = `
NFS_Core_Param { Protocols = 4; Bind_addr = ADDRESS; NFS_Port = 2050; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 { Graceless = true; RecoveryBackend = fs; RecoveryRoot = "STATE"; }
EXPORT {
  Export_Id = 1; Path = "FOLDER"; Pseudo = EXPORT_PATH; Protocols = 4; Transports = TCP; SecType = sys;
  Access_Type = RW; Squash = No_Root_Squash;
  FSAL { Name = VFS; }
}
`

// serveNFS4 serves folder in the nodes' network.
func serveNFS4(t *testing.T, c *e2etest.Cluster, folder string) {
	t.Helper()
	state := t.TempDir()
	conf := filepath.Join(state, "ganesha.conf")
	text := strings.NewReplacer("ADDRESS", nfsServer, "STATE", state, "FOLDER", folder, "EXPORT_PATH", nfsExport).Replace(ganesha)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	serve(t, c, "/usr/bin/ganesha.nfsd", "-F", "-L", "/dev/stderr", "-p", filepath.Join(state, "pid"), "-f", conf)
}

func serve(t *testing.T, c *e2etest.Cluster, args ...string) (kill func()) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.Network().Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	return kill
}

// shares: a pod uses a volume of an NFS server (S-360). It reads files of this machine
// there, and the other way round. A volume that the server doesn't have is reported.
func shares(t *testing.T, c *e2etest.Cluster, folder, pod, options string) {
	t.Helper()
	const greeting = "hello from this machine"
	if err := os.WriteFile(filepath.Join(folder, "greeting"), []byte(greeting), 0o600); err != nil {
		t.Fatal(err)
	}
	apply(c, pod, nfsExport, options)
	apply(c, pod+"-missing", "/srv/missing", options)
	c.Eventually(mountBudget, "a pod serves a volume of the NFS server", func() error {
		out, err := c.Try("get", "pod", pod, "-o", `jsonpath={.status.podIP} {.status.conditions[?(@.type=="Ready")].status}`)
		if err != nil {
			return err
		}
		ip, ready, _ := strings.Cut(out, " ")
		if ready != "True" {
			return fmt.Errorf("it isn't ready:\n%s", events(c, pod))
		}
		if out, err = get(c, "http://"+ip+":8080", "/share/greeting"); err == nil && out != greeting {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	})
	c.Kubectl("exec", pod, "--", "/usr/local/bin/kubectl", "--kubeconfig=/share/written", "config", "set-cluster", "from-the-pod")
	if written, err := os.ReadFile(filepath.Join(folder, "written")); err != nil || !strings.Contains(string(written), "from-the-pod") {
		t.Errorf("what the pod wrote reads %q, %v", written, err)
	}
	c.Eventually(mountBudget, "an event has the volume that the server doesn't have", func() error {
		if text := events(c, pod+"-missing"); !strings.Contains(text, "FailedMount") || !strings.Contains(text, nfsServer+":/srv/missing failed, reason given by server") {
			return errors.New(text)
		}
		return nil
	})
}

func events(c *e2etest.Cluster, pod string) string {
	out, err := c.Try("events", "--for=pod/"+pod)
	if err != nil {
		return err.Error()
	}
	return out
}

// youngest returns the row of the last process that runs kubectl, with its processor time, and its PID. The arguments
// of pods' processes aren't shown.
func youngest(c *e2etest.Cluster) (row, pid string, err error) {
	out, err := c.TryGbctl("processes", "--sort", "pid")
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.Contains(line, "(kubectl)") {
			row, pid = line, fields[0]+" "+fields[1] // perhaps with the node
		}
	}
	return row, pid, err
}

// strands leaves a pod in the middle of a write to a server that is gone. The
// node still reports the usage of its other file systems.
func strands(t *testing.T, c *e2etest.Cluster, kill func()) {
	t.Helper()
	kill()
	_, former, err := youngest(c)
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	t.Cleanup(func() { <-over })
	go func() { // it hangs until the node is off or the test has ended
		defer close(over)
		_, _ = c.Try("exec", "shared", "--", "/usr/local/bin/kubectl", "--kubeconfig=/share/late", "config", "set-cluster", "late")
	}()
	var is string
	c.Eventually(mountBudget, "a pod writes to the server that is gone, and gets no further", func() error {
		row, pid, err := youngest(c)
		was := is
		if is = row; err == nil && (pid == former || is != was) {
			err = fmt.Errorf("it is %q, and was %q", is, was)
		}
		return err
	})
	if out := c.Gbctl("mounts"); !e2etest.Row(out, nfsServer+":"+nfsExport, "nfs") || !e2etest.Row(out, "/var", "xfs", "GiB") {
		t.Errorf("gbctl mounts says:\n%s", out)
	}
}
