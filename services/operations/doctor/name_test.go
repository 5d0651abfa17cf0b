package doctor

import (
	"context"
	"encoding/base64"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

// joins is the request of a kubelet for a certificate of a name, and what was decided.
func (n *node) joins(name string, code reason.Code, at time.Time) {
	n.t.Helper()
	key, err := pki.NewKey(pki.ECDSA)
	n.must(err)
	text, err := pki.NewRequest(key, pki.Leaf{CN: config.NodeUser + name, Orgs: []string{"system:nodes"}})
	n.must(err)
	n.api.put(kubeclient.Object{
		"kind": csrKind, "metadata": map[string]any{"name": "node-csr-" + name},
		"spec": map[string]any{"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "username": "system:bootstrap:ors9gp", "request": base64.StdEncoding.EncodeToString(text)},
		"status": map[string]any{"conditions": []any{map[string]any{"type": "Denied", "status": "True", "reason": string(code), "message": "because of " + name,
			"lastTransitionTime": at.UTC().Format(time.RFC3339)}}},
	})
}

// The machine that has a name is told of one that wants it, for as long as that one asks.
func TestNameIsWanted(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	soon := time.Now().Add(2 * time.Second) // times of Kubernetes are whole seconds
	n.now = func() time.Time { return soon }
	n.joins("another", roster.NameTaken, soon)
	n.joins(nodeName, "GarboardDenied", soon)
	n.healthy()
	n.joins(nodeName, roster.NameTaken, soon)
	n.finds("node-name-taken", warning, `wants the name "`+nodeName+`"`, "node-csr-"+nodeName, "because of "+nodeName, "machine.network.hostname")
	n.now = func() time.Time { return soon.Add(nameTime) }
	n.lacks("node-name-taken")
	n.joins(nodeName, roster.NameTaken, soon.Add(-time.Hour)) // its own, before it got the name
	n.now = func() time.Time { return soon }
	n.lacks("node-name-taken")
}

// The machine that doesn't get it says so, and all else follows from that.
func TestNameIsTaken(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(_ *node, services map[string]*dag.Service) {
		services["kubelet"].Prepare = func(ctx context.Context, h *dag.Handle) error {
			h.EventOf(roster.NameTaken, "Waiting for a client certificate: the name belongs to the machine at 10.5.0.3")
			<-ctx.Done()
			return nil
		}
	})
	n.finds("node-name-taken", failure, "doesn't register", "at 10.5.0.3", "kubectl delete node")
	n.finds("kubelet-not-running", info, "Follows from node-name-taken")
}
