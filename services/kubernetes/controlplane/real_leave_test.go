//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// S-180, S-181: a real API server allows a kubelet what a reset needs on its
// own node and pods, and no more; a control plane deletes the node.
func TestRealWorkerLeaves(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.spots = &spotter{testWriter{t}, "node w is being reset, but isn't deleted", make(chan struct{}), sync.Once{}}
	n.prepare()
	owner := n.machine("w", kubeclient.LeavePurpose)
	n.runControllers()
	n.startEtcd()
	for _, program := range []string{apiServer, controllerManager} {
		n.startProgram(program)
	}
	admin, worker, ctx := n.admin(), n.kubelet("w"), t.Context()
	for _, name := range []string{"w", "other"} {
		_, err := admin.Create(ctx, kubeclient.Object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name}})
		put(t, err)
	}
	did, err := worker.Cordon(ctx, "w", "reset-1")
	if !did || err != nil {
		t.Fatalf("cordon: %v, %v", did, err)
	}
	if _, err := worker.Cordon(ctx, "other", "reset-1"); !kubeclient.IsForbidden(err) {
		t.Errorf("cordon of another node: %v", err)
	}
	n.checkDrain(admin, worker)
	if did, err := worker.Uncordon(ctx, "w", "reset-1"); !did || err != nil {
		t.Errorf("uncordon: %v, %v", did, err)
	}
	if err := worker.Delete(ctx, kubeclient.NodeRef("w")); !kubeclient.IsForbidden(err) {
		t.Errorf("a kubelet deletes its own node: %v", err)
	}
	n.checkLeaves(admin, worker, owner)
}

// spotter is a log, and closes seen when a line has the words.
type spotter struct {
	testWriter
	words string
	seen  chan struct{}
	once  sync.Once
}

func (s *spotter) Write(line []byte) (int, error) {
	if strings.Contains(string(line), s.words) {
		s.once.Do(func() { close(s.seen) })
	}
	return s.testWriter.Write(line)
}

// kubelet is a client with the certificate of a worker's kubelet.
func (n *realNode) kubelet(name string) *kubeclient.Client {
	n.t.Helper()
	crt, key, err := n.config.Cluster.CA.CA().Issue(pki.Leaf{CN: config.NodeUser + name, Orgs: []string{nodeGroup}, Client: true, Validity: time.Hour, Now: time.Now()})
	put(n.t, err)
	c, err := kubeclient.New(kubeclient.Options{
		Server: n.config.Cluster.ControlPlane.Endpoint.String(), CA: n.config.Cluster.CA.Crt, Cert: crt, Key: key,
	})
	put(n.t, err)
	n.t.Cleanup(c.Close)
	return c
}

// machine makes the proofs of a worker's machine, with a key of its own.
func (n *realNode) machine(name, purpose string) func(message []byte) ([]byte, error) {
	n.t.Helper()
	crt, key, err := n.config.Machine.CA.CA().Issue(pki.Leaf{CN: name, DNS: []string{name}, Server: true, Now: time.Now()})
	put(n.t, err)
	cert, err := pki.ParseCert(crt)
	put(n.t, err)
	if n.owner == "" && purpose == kubeclient.LeavePurpose {
		n.owner, err = pki.KeyID(cert.PublicKey)
		put(n.t, err)
	}
	return func(message []byte) ([]byte, error) { return pki.Prove(crt, key, purpose, message) }
}

// checkDrain: a kubelet may evict only the pods of its own node. There is no
// kubelet here to end them.
func (n *realNode) checkDrain(admin, worker *kubeclient.Client) {
	n.t.Helper()
	ctx := n.t.Context()
	var elsewhere kubeclient.Object
	for name, node := range map[string]string{"mine": "w", "elsewhere": "other"} {
		// its service account must exist first
		eventually.That(n.t, 30*time.Second, "a pod to be made", func() (err error) {
			elsewhere, err = admin.Create(ctx, kubeclient.Object{
				"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": name, "namespace": "default"},
				"spec": object{"nodeName": node, "containers": list{object{"name": "c", "image": "none"}}},
			})
			return err
		})
		if name != "elsewhere" {
			continue
		}
		// An API server without a new pod in its cache answers that there is none.
		eventually.That(n.t, 15*time.Second, "eviction of a pod on another node is refused", func() error {
			if err := worker.Evict(ctx, elsewhere); !kubeclient.IsForbidden(err) {
				return fmt.Errorf("it says %v", err)
			}
			return nil
		})
	}
	ctx, cancel := context.WithTimeout(ctx, eventually.Scale(15*time.Second))
	defer cancel()
	err := kubeclient.Drain{Client: worker, Node: "w", Report: func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		if n.t.Log(text); strings.Contains(text, "is ending") {
			cancel() // nothing more happens
		}
	}}.Run(ctx)
	var left *kubeclient.Left
	if !errors.As(err, &left) || len(left.Pods) != 1 || left.Pods[0] != "default/mine (is ending)" {
		n.t.Errorf("drained: %v", err)
	}
}

// checkLeaves: a node with such taints or labels isn't deleted; others are.
func (n *realNode) checkLeaves(admin, worker *kubeclient.Client, owner func([]byte) ([]byte, error)) {
	n.t.Helper()
	ctx := n.t.Context()
	_, err := admin.Merge(ctx, kubeclient.NodeRef("w"), kubeclient.Object{"spec": object{"taints": list{object{"key": "quarantine", "effect": "NoExecute"}}}})
	put(n.t, err)
	brief, cancel := context.WithTimeout(ctx, eventually.Scale(15*time.Second))
	defer cancel()
	go func() {
		select {
		case <-n.spots.seen: // the worker still needs the answer to its request
			time.AfterFunc(eventually.Scale(time.Second), cancel)
		case <-brief.Done():
		}
	}()
	if err := worker.AskToLeave(brief, "w", "reset-1", owner); err == nil || !strings.Contains(err.Error(), "kubectl delete node w") {
		n.t.Errorf("a node with a taint of others leaves: %v", err)
	}
	// It withdraws the request: otherwise it would be deleted later, when the taint is gone.
	put(n.t, worker.Stay(ctx, "w", "reset-2"))
	if node, err := admin.Get(ctx, kubeclient.NodeRef("w")); err != nil || node.Text("metadata", "annotations", kubeclient.Leaving) != "reset-1" {
		n.t.Errorf("another takes it back: %v, %v", node, err)
	}
	put(n.t, worker.Stay(ctx, "w", "reset-1"))
	if node, err := admin.Get(ctx, kubeclient.NodeRef("w")); err != nil || node.Text("metadata", "annotations", kubeclient.Leaving) != "" {
		n.t.Errorf("it is still asked to leave: %v, %v", node, err)
	}
	_, err = admin.Merge(ctx, kubeclient.NodeRef("w"), kubeclient.Object{"spec": object{"taints": nil}})
	put(n.t, err)
	// Whoever may write to Nodes ends none.
	for _, name := range []string{"other", "w"} { // w: the machine that had the name before
		brief, cancel := context.WithTimeout(ctx, eventually.Scale(5*time.Second))
		if err := worker.AskToLeave(brief, "w", "reset-3", n.machine(name, kubeclient.LeavePurpose)); err == nil {
			n.t.Errorf("a node leaves by the proof of another machine, which had the name %s", name)
		}
		cancel()
		put(n.t, worker.Stay(ctx, "w", "reset-3"))
	}
	patient, cancel := context.WithTimeout(ctx, eventually.Scale(30*time.Second))
	defer cancel()
	if err := worker.AskToLeave(patient, "w", "reset-1", owner); err != nil {
		n.t.Error(err)
	}
	if _, err := admin.Get(ctx, kubeclient.NodeRef("other")); err != nil {
		n.t.Errorf("the other node: %v", err)
	}
}
