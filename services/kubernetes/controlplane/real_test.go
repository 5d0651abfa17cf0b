//go:build e2e

package controlplane

import (
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// componentsVar is a list like PATH of the folders with etcd and the control plane's
// programs. `make e2e` sets it once they are built.
const componentsVar = "GARBOARD_COMPONENTS"

// realNode is a control plane without a kubelet: the test starts the programs
// in the static pods' files.
type realNode struct {
	t       *testing.T
	dir     string
	config  *config.Config
	store   *resource.Store
	etcdURL string
	now     func() time.Time // of the secrets; nil: time.Now
	spots   *spotter         // reads the log of the controllers; nil: nobody does

	owner      string      // the key of the machine with the name w
	selfHosted bool        // etcd has the mark at its start
	args       config.Args // of kube-apiserver
}

// S-210, S-216, S-217, S-218, S-266, S-268, S-342: real etcd and a real control
// plane accept the rendered files, and a joining kubelet gets its certificate.
func TestRealControlPlane(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t), selfHosted: true}
	n.prepare()
	n.runControllers()
	if entries, _ := os.ReadDir(n.path("static-pods")); len(entries) > 0 {
		t.Fatalf("static pods before etcd is up: %v", entries)
	}
	n.startEtcd()
	n.checkSelfHosted()
	for _, program := range Programs {
		n.startProgram(program)
	}
	client := n.admin()
	n.checkManifests(client)
	n.checkDrift("none", "11-core-dns")
	n.checkBootstrap(client)
	n.checkCreateOnly(client)
	n.checkLabel(client)
	n.checkNodeAdmission(client)
	n.checkHealthEndpoints()
	n.checkEncryption(client)
	n.checkAuditLog()
}

func (n *realNode) path(parts ...string) string {
	return filepath.Join(append([]string{n.dir}, parts...)...)
}

// prepare replaces every fixed port of a node by a free one on loopback.
func (n *realNode) prepare() {
	c := &n.config.Cluster
	port := int(freeport.Find(n.t).Port())
	endpoint, err := config.ParseURL("https://127.0.0.1:" + strconv.Itoa(port))
	put(n.t, err)
	c.ControlPlane = config.ControlPlaneSet{Endpoint: endpoint, LocalAPIServerPort: port}
	n.etcdURL = "https://" + freeport.Find(n.t).String()
	c.APIServer.ExtraArgs = config.Args{"bind-address": {"127.0.0.1"}, "etcd-servers": {n.etcdURL}}
	maps.Copy(c.APIServer.ExtraArgs, n.args)
	c.ControllerManager.ExtraArgs = config.Args{"secure-port": {strconv.Itoa(int(freeport.Find(n.t).Port()))}, "flex-volume-plugin-dir": {n.path("flex")}}
	c.Scheduler.ExtraArgs = config.Args{"secure-port": {strconv.Itoa(int(freeport.Find(n.t).Port()))}}
	n.store = testStore(n.t, n.config)
}

func (n *realNode) runControllers() {
	controllers := append(
		secrets.Controllers(secrets.Options{Dir: n.path("secrets"), Now: n.now, Balancer: n.config.Cluster.ControlPlane.Endpoint.String()}),
		Controllers(Options{
			Logs: logs.New(testWriter{n.t}), StaticPodsDir: n.path("static-pods"), CheckpointsDir: n.path("checkpoints"), FilesDir: n.path("files"), AuditDir: n.path("audit"), SecretsDir: n.path("secrets"),
			CNIConfDir: n.path("cni"), SubnetFile: n.path("subnet.env"), KubeletURL: "https://127.0.0.1:1",
			Roster: func(context.Context) (roster.Facts, error) {
				// The machine with the name w was reinstalled, and has another key than the one that had it.
				return roster.Facts{Names: []string{"n1"}, Nodes: map[string]bool{"n3": true, "w": true}, Records: map[string]roster.Record{"w": {Key: n.owner}}, Now: time.Now()}, nil
			},
			Enlist: func(_ context.Context, name string, r roster.Record) error {
				if name != "n2" || !r.Certified || r.Key == "" {
					n.t.Errorf("%s is recorded as %+v", name, r)
				}
				return nil
			},
		})...)
	log := testLog(n.t)
	if n.spots != nil {
		log = slog.New(slog.NewTextHandler(n.spots, nil))
	}
	rt, err := resource.NewRuntime(n.store, log, controllers...)
	put(n.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = rt.Run(ctx) }()
	n.t.Cleanup(func() { cancel(); <-done })
}

// checkSelfHosted: with the mark in etcd, pods are rendered and nothing is written; without
// it, everything goes on (S-260, S-298, S-301).
func (n *realNode) checkSelfHosted() {
	eventually.That(n.t, 20*time.Second, "it is self-hosted, and pods are rendered", func() error {
		o, err := BootstrapStatuses.Get(n.store, "control-plane")
		if err == nil && !o.Spec.SelfHosted {
			n.t.Fatal("it isn't self-hosted")
		}
		if err == nil && len(StaticPods.List(n.store)) != len(Programs) {
			err = errors.New("there are no pods")
		}
		return err
	})
	if files, _ := os.ReadDir(n.path("manifests")); len(files) > 0 {
		n.t.Errorf("written while self-hosted: %v", files)
	}
	n.mark(func(client *clientv3.Client) error {
		_, err := client.Delete(n.t.Context(), initializedKey)
		return err
	})
}

// mark changes the mark of a self-hosted control plane.
func (n *realNode) mark(change func(*clientv3.Client) error) {
	eventually.That(n.t, 20*time.Second, "etcd takes a write", func() error {
		ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
		defer cancel()
		client, err := etcd.Dial(ctx, n.store, n.etcdURL)
		if err != nil {
			return err
		}
		defer client.Close()
		return change(client)
	})
}

func (n *realNode) startEtcd() {
	eventually.That(n.t, 10*time.Second, "etcd's certificates", func() error {
		_, err := secrets.Statuses.Get(n.store, secrets.EtcdID)
		return err
	})
	file := func(name string) string { return n.path("secrets", secrets.EtcdID, name) }
	peer := "http://" + freeport.Find(n.t).String()
	n.start("etcd", "--data-dir="+n.path("etcd"), "--listen-client-urls="+n.etcdURL, "--advertise-client-urls="+n.etcdURL,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer, "--unsafe-no-fsync",
		"--client-cert-auth", "--trusted-ca-file="+file("ca.crt"), "--cert-file="+file("server.crt"), "--key-file="+file("server.key"))
	if n.selfHosted {
		n.mark(func(client *clientv3.Client) error {
			_, err := client.Put(n.t.Context(), initializedKey, "")
			return err
		})
	}
	put(n.t, etcd.Statuses.Put(n.store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: n.etcdURL}))
}

// startProgram runs the command of a static pod's file, until stop or the end of the test.
func (n *realNode) startProgram(name string) (stop func()) {
	var pod map[string]any // the decoder would make nested maps Objects too
	eventually.That(n.t, 10*time.Second, "static pod "+name, func() error {
		data, err := os.ReadFile(n.path("static-pods", "garboard-"+name+".yaml"))
		if err != nil {
			return err
		}
		return yaml.Unmarshal(data, &pod)
	})
	var command []string
	for _, arg := range kubeclient.Object(pod).List("spec", "containers")[0]["command"].([]any) {
		command = append(command, arg.(string))
	}
	return n.start(command[0], command[1:]...)
}

// program finds a program that was built.
func (n *realNode) program(name string) string {
	n.t.Helper()
	for _, dir := range filepath.SplitList(os.Getenv(componentsVar)) {
		if path := filepath.Join(dir, name); executable(path) {
			return path
		}
	}
	n.t.Fatalf("no %s in %s=%q: `make e2e` builds the components and sets it", name, componentsVar, os.Getenv(componentsVar))
	return ""
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o100 != 0
}

// start runs a program until stop or the end of the test; its output is shown if the test fails.
func (n *realNode) start(name string, args ...string) (stop func()) {
	output, err := os.Create(n.path(name + ".log"))
	put(n.t, err)
	cmd := exec.Command(n.program(name), args...)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	put(n.t, cmd.Start())
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		output.Close()
		if n.t.Failed() {
			said, _ := os.ReadFile(output.Name())
			n.t.Logf("%s said:\n%s", name, said[max(0, len(said)-8000):])
		}
	})
	n.t.Cleanup(stop)
	return stop
}

func (n *realNode) admin() *kubeclient.Client {
	o, err := secrets.Kubernetes.Get(n.store, secrets.KubernetesID)
	put(n.t, err)
	client, err := kubeclient.New(throughBalancer(o.Spec))
	put(n.t, err)
	n.t.Cleanup(client.Close)
	eventually.That(n.t, 90*time.Second, "apiserver to be ready", func() error { return client.Ready(context.Background()) })
	return client
}

func (n *realNode) checkManifests(client *kubeclient.Client) {
	n.t.Helper()
	for _, o := range WantedObjects(n.store) {
		eventually.That(n.t, 60*time.Second, o.String()+" to be made", func() error {
			missing, err := client.Missing(n.t.Context(), o)
			if err == nil && missing {
				err = errors.New("still missing")
			}
			return err
		})
	}
}

// checkCreateOnly: changes by users stay, deleted objects are made again (S-218).
func (n *realNode) checkCreateOnly(client *kubeclient.Client) {
	n.t.Helper()
	ctx := n.t.Context()
	changed := kubeclient.Ref{APIVersion: "v1", Kind: "ConfigMap", Namespace: kubeSystem, Name: "coredns"}
	gone := kubeclient.Ref{APIVersion: "v1", Kind: "Service", Namespace: kubeSystem, Name: "kube-dns"}
	_, err := client.Merge(ctx, changed, kubeclient.Object{"data": object{"Corefile": "mine"}})
	put(n.t, err)
	put(n.t, client.Delete(ctx, gone))
	for _, ready := range []bool{false, true} {
		put(n.t, etcd.Statuses.Put(n.store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: ready, Endpoint: n.etcdURL}))
	}
	eventually.That(n.t, 30*time.Second, "the deleted Service to come back", func() error {
		_, err := client.Get(ctx, gone)
		return err
	})
	if o, err := client.Get(ctx, changed); err != nil || o.Text("data", "Corefile") != "mine" {
		n.t.Errorf("the changed ConfigMap is %v, %v", o["data"], err)
	}
	n.checkDrift("/v1/ConfigMap/coredns: data.Corefile", "11-core-dns")
}

// checkDrift: only the manifest whose objects were changed has a drift.
func (n *realNode) checkDrift(want, id string) {
	n.t.Helper()
	// The controller compares when something changes, and at intervals.
	put(n.t, etcd.Statuses.Put(n.store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: n.etcdURL, MemberID: want}))
	eventually.That(n.t, 60*time.Second, "the drift of "+id+" to be "+want, func() error {
		for _, m := range BootstrapManifests.List(n.store) {
			d, err := ManifestDrifts.In(m.Namespace).Get(n.store, m.ID)
			expected := "none"
			if m.ID == id {
				expected = want
			}
			if err != nil || d.Spec.String() != expected {
				return fmt.Errorf("%s: %s, %v", m.ID, d.Spec, err)
			}
		}
		return nil
	})
}

// checkBootstrap requests certificates like joining kubelets: the token gives a fresh name to a machine that proves to
// have a key, and neither that of a control plane nor that of a node.
func (n *realNode) checkBootstrap(client *kubeclient.Client) {
	n.t.Helper()
	kubelet, err := kubeclient.New(kubeclient.Options{Server: n.config.Cluster.ControlPlane.Endpoint.String(), CA: n.config.Cluster.CA.Crt, Token: testToken})
	put(n.t, err)
	closed := n.bindAsFormer(client)
	for name, want := range map[string]string{"n1": "one of the control planes'", "n2": "", "n2-unsigned": "isn't signed with the key", "n3": "kubectl delete node n3"} {
		key, err := pki.NewKey(pki.ECDSA)
		put(n.t, err)
		text, err := pki.NewRequest(key, pki.Leaf{CN: config.NodeUser + name, Orgs: []string{nodeGroup}})
		put(n.t, err)
		meta := object{"name": name}
		if block, _ := pem.Decode(text); name == "n2" {
			proof, err := n.machine(name, kubeclient.JoinPurpose)(block.Bytes)
			put(n.t, err)
			meta["annotations"] = object{kubeclient.JoinProof: string(proof)}
		}
		made, err := kubelet.Create(n.t.Context(), kubeclient.Object{
			"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": meta,
			"spec": object{"request": base64.StdEncoding.EncodeToString(text), "signerName": clientSigner, "usages": list{"digital signature", "client auth"}},
		})
		if err != nil {
			n.t.Fatalf("a bootstrap token can't ask for a certificate: %v", err)
		}
		eventually.That(n.t, 60*time.Second, "the request of "+name+" to be answered", func() error {
			o, err := client.Get(n.t.Context(), made.Ref())
			switch {
			case err != nil:
				return err
			case want == "" && o.Text("status", "certificate") != "":
				return nil
			case want != "" && o.Condition(kubeclient.Denied) && strings.Contains(o.List("status", "conditions")[0].Text("message"), want):
				return nil
			}
			return fmt.Errorf("status is %v", o["status"])
		})
	}
	closed()
}

// bindAsFormer makes the binding for renewals that of a former release, which approves each request of a node, and that
// of somebody else whom an administrator has added. The returned function checks that only this one is left.
func (n *realNode) bindAsFormer(client *kubeclient.Client) (check func()) {
	n.t.Helper()
	ref := kubeclient.Ref{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRoleBinding", Name: "system-bootstrap-node-renewal"}
	bind := func(subjects list) {
		n.t.Helper()
		_, err := client.Merge(n.t.Context(), ref, kubeclient.Object{"subjects": subjects})
		put(n.t, err)
	}
	subject := func(kind, name string) object {
		return object{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
	}
	bind(list{subject("Group", nodeGroup), subject("User", "jo")})
	return func() {
		n.t.Helper()
		got, err := client.Get(n.t.Context(), ref)
		if left := got.List("subjects"); err != nil || len(left) != 1 || left[0].Text("name") != "jo" {
			n.t.Errorf("%s has %v, %v", ref, left, err)
		}
		bind(list{})
	}
}

// checkLabel registers a node like the kubelet (S-221).
func (n *realNode) checkLabel(client *kubeclient.Client) {
	n.t.Helper()
	node := kubeclient.Object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": "n1"}}
	_, err := client.Create(n.t.Context(), node)
	put(n.t, err)
	eventually.That(n.t, 30*time.Second, "node to be marked as a control plane", func() error {
		o, err := client.Get(n.t.Context(), kubeclient.Ref{APIVersion: "v1", Kind: "Node", Name: "n1"})
		if err != nil {
			return err
		}
		labels, _ := o.At("metadata", "labels").(map[string]any)
		if _, ok := labels[config.ControlPlaneRole]; !ok || !strings.Contains(fmt.Sprint(o.At("spec", "taints")), config.ControlPlaneRole) {
			return fmt.Errorf("labels %v, taints %v", labels, o.At("spec", "taints"))
		}
		return nil
	})
}

// as is a client with a user name of its own.
func (n *realNode) as(user string, groups ...string) *kubeclient.Client {
	n.t.Helper()
	crt, key, err := n.config.Cluster.CA.CA().Issue(pki.Leaf{CN: user, Orgs: groups, Client: true, Validity: time.Hour, Now: time.Now()})
	put(n.t, err)
	c, err := kubeclient.New(kubeclient.Options{Server: n.config.Cluster.ControlPlane.Endpoint.String(), CA: n.config.Cluster.CA.Crt, Cert: crt, Key: key})
	put(n.t, err)
	n.t.Cleanup(c.Close)
	return c
}

// checkNodeAdmission: an account that may patch Nodes, as agents on all nodes have one,
// doesn't make a node another one. Everything else is its right.
func (n *realNode) checkNodeAdmission(admin *kubeclient.Client) {
	n.t.Helper()
	for _, o := range []kubeclient.Object{
		{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": object{"name": "agent"}, "rules": list{
			object{"apiGroups": list{""}, "resources": list{"nodes", "nodes/status"}, "verbs": list{"get", "list", "patch", "update"}},
		}},
		{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": object{"name": "agent"},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent"},
			"subjects": list{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "agent"}, object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:serviceaccount:kube-system:flannel"}}},
	} {
		_, err := admin.Create(n.t.Context(), o)
		put(n.t, err)
	}
	meta := func(field, key string, value any) kubeclient.Object {
		return kubeclient.Object{"metadata": object{field: object{key: value}}}
	}
	agent := n.as("agent")
	// the policy begins to count within seconds
	eventually.That(n.t, 30*time.Second, "an agent to be refused", func() error {
		if _, err := agent.Merge(n.t.Context(), kubeclient.NodeRef("n1"), meta("labels", "garboard.dev/a", "b")); err == nil || !strings.Contains(err.Error(), "garboard-nodes") {
			return fmt.Errorf("it says %w", errors.Join(err, errors.New("nothing about the policy")))
		}
		return nil
	})
	for name, tc := range map[string]struct {
		as    *kubeclient.Client
		patch kubeclient.Object
		want  string
	}{
		"a role":               {agent, meta("labels", config.ControlPlaneRole, nil), "labels of"},
		"a restricted label":   {agent, meta("labels", "node-restriction.kubernetes.io/zone", "a"), "labels of"},
		"one below it":         {agent, meta("labels", "x.node-restriction.kubernetes.io/zone", "a"), "labels of"},
		"its end":              {agent, meta("annotations", kubeclient.Leaving, "reset-1"), "annotations of"},
		"a label of its own":   {agent, meta("labels", "example.com/gpu", "yes"), ""},
		"flannel on elsewhere": {n.as("system:serviceaccount:kube-system:flannel"), meta("annotations", "flannel.alpha.coreos.com/public-ip", "10.5.0.66"), "flannel changes"},
		"an administrator":     {admin, meta("labels", "node-restriction.kubernetes.io/zone", "b"), ""},
	} {
		_, err := tc.as.Merge(n.t.Context(), kubeclient.NodeRef("n1"), tc.patch)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			n.t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// checkAuditLog: the log has the user who made the Secrets of the bootstrap
// manifests, and not their content.
func (n *realNode) checkAuditLog() {
	n.t.Helper()
	log, err := os.ReadFile(n.path("audit", apiServer+".log"))
	put(n.t, err)
	if !strings.Contains(string(log), `"resource":"secrets"`) || !strings.Contains(string(log), `"username":"admin"`) {
		n.t.Errorf("no change of a Secret in the audit log:\n%.2000s", log)
	}
	for _, not := range []string{"requestObject", "responseObject", `"verb":"watch"`, `"resource":"leases"`} {
		if strings.Contains(string(log), not) {
			n.t.Errorf("%s is in the audit log", not)
		}
	}
}

// checkHealthEndpoints: anonymous requests are allowed there, and nowhere else.
func (n *realNode) checkHealthEndpoints() {
	n.t.Helper()
	nobody, err := kubeclient.New(kubeclient.Options{Server: n.config.Cluster.ControlPlane.Endpoint.String(), CA: n.config.Cluster.CA.Crt})
	put(n.t, err)
	if err := nobody.Ready(n.t.Context()); err != nil {
		n.t.Errorf("/readyz without a name: %v", err)
	}
	var status *kubeclient.StatusError
	if _, err := nobody.Raw(n.t.Context(), "/api"); !errors.As(err, &status) || status.Code != 401 {
		n.t.Errorf("/api without a name: %v, want 401", err)
	}
}

// checkEncryption looks for a Secret's content in etcd's files.
func (n *realNode) checkEncryption(client *kubeclient.Client) {
	n.t.Helper()
	const marker = "garboard-plain-text-marker"
	_, err := client.Apply(n.t.Context(), kubeclient.Object{
		"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "probe", "namespace": "default"}, "stringData": object{"k": marker},
	})
	put(n.t, err)
	put(n.t, filepath.WalkDir(n.path("etcd"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if strings.Contains(string(data), marker) {
			n.t.Errorf("%s holds the Secret in plain text", path)
		}
		return err
	}))
}
