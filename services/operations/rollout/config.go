package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
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
