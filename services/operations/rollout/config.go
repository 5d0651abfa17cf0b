package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// SameRelease says why a node can't take part in an operation that needs the same release on
// all nodes.
func SameRelease(ctx context.Context, peers Peers, n Node) error {
	if !n.Address.IsValid() {
		return errors.New("it has no InternalIP in Kubernetes")
	}
	has, err := peers.Version(ctx, n.Address)
	if err != nil {
		return err
	}
	if has.GetVersion() != boot.Version {
		return fmt.Errorf("it runs release %s, and this node %s: all nodes must run the same release", has.GetVersion(), boot.Version)
	}
	return nil
}

// Survey lists the nodes of the cluster, in the order of their names, and asks each of them. All must be Ready and run
// the same release. The error names everything that is wrong.
func Survey(ctx context.Context, k Kubernetes, peers Peers, ask func(Node) error) (nodes []Node, err error) {
	objects, err := k.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	var problems []error
	for _, o := range objects {
		n := NodeOf(o)
		nodes, problems = append(nodes, n), append(problems, Ready(o))
		err := SameRelease(ctx, peers, n)
		if err == nil {
			err = ask(n)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("node %s: %w", n.Name, err))
		}
	}
	if len(ControlPlanes(nodes)) == 0 {
		problems = append(problems, fmt.Errorf("no node has the label %s", ControlPlaneLabel))
	}
	return nodes, errors.Join(problems...)
}

// First looks at the cluster before the first change, and records what there is, and what is excused. What was there
// first counts, also after a restart.
func First[T any](ctx context.Context, p *operation.Progress, peers Peers, d operation.Data[T], look func(context.Context) (T, error), nodes func(T) []Node) error {
	if _, err := d.Get(p); err == nil {
		return nil
	}
	var found T
	if err := Poll(ctx, p, func(ctx context.Context) (err error) { found, err = look(ctx); return err }); err != nil {
		return err
	}
	return errors.Join(Excuse(ctx, p, peers, nodes(found)), d.Put(p, found))
}

// Config is the configuration of a node, whose secrets are redacted, and its digest.
func Config(ctx context.Context, peers Peers, n Node) (config kubeclient.Object, digest string, err error) {
	document, err := peers.Config(ctx, n.Address)
	if err != nil {
		return nil, "", err
	}
	config, err = ParseConfig(document.GetDocument())
	return config, document.GetDigest(), err
}

// ParseConfig reads the document of a node.
func ParseConfig(document []byte) (kubeclient.Object, error) {
	var tree map[string]any
	if err := yaml.Unmarshal(document, &tree); err != nil {
		return nil, fmt.Errorf("its configuration: %w", err)
	}
	return tree, nil
}

// Change is Patch, whatever the configuration is.
func Change(ctx context.Context, peers Peers, n Node, patch any, lasting ...connect.Code) error {
	_, digest, err := Config(ctx, peers, n)
	if err != nil {
		return err
	}
	return Patch(ctx, peers, n, digest, patch, lasting...)
}

// Patch changes the configuration of a node, which has a digest. An error with one of the
// codes is lasting, like the refusal of the patch itself; others, such as a missing quorum,
// other nodes can end.
func Patch(ctx context.Context, peers Peers, n Node, digest string, patch any, lasting ...connect.Code) error {
	text, err := yaml.Marshal(patch)
	if err != nil {
		return err
	}
	_, err = peers.Patch(ctx, n.Address, digest, text)
	if slices.Contains(append(lasting, connect.CodeInvalidArgument, connect.CodePermissionDenied), connect.CodeOf(err)) {
		err = Lasting{Err: err}
	}
	return err
}
