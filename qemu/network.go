package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/garboard-os/garboard/qemu/network"
)

// lan is the network of the nodes of the cluster in a directory.
func (p Plan) lan(d clusterDir) (network.Config, error) {
	loaded, err := d.loaded()
	c := network.Config{Cluster: p.Name, Prefix: p.Network, Second: p.Second, Images: []string{string(loaded), p.Images}, Boot: p.Boot.Network, Internet: p.Internet, Mirrors: p.Mirrors}
	if p.Provisioner == Docker { // the host process is in a container, too
		c.Host = p.router().String()
	}
	if p.Boot.Installer != "" {
		c.Images = append(c.Images, p.Boot.Installer)
	}
	for _, n := range p.Nodes {
		c.Nodes = append(c.Nodes, n.onLAN())
	}
	return c, err
}

func (n Node) onLAN() network.Node { return network.Node{Name: n.Name, Address: n.Address} }

// SetNetwork makes the conditions of a node's network bad, or normal again. They stay so
// when the node starts again, and are normal when the cluster does.
func (c *Cluster) SetNetwork(ctx context.Context, node string, n network.Conditions) error {
	conditions, err := json.Marshal(n)
	if err != nil {
		return err
	}
	query := url.Values{"conditions": {string(conditions)}}
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/network?"+query.Encode(), nil)
}

func (h *hostProcess) setNetwork(n *node, to network.Conditions) error {
	if err := to.Check(); err != nil {
		return err
	}
	for _, other := range slices.Concat(to.CutFrom, to.DeafTo) {
		if _, err := h.node(other); err != nil {
			return err
		}
	}
	if h.lan == nil {
		return errOfDocker
	}
	if err := h.lan.SetConditions(n.onLAN(), to); err != nil {
		return fmt.Errorf("network of %s: %w", n.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.network = to
	return nil
}
