package qemu

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

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
	query := url.Values{
		"off": {strconv.FormatBool(n.Off)}, "cut-from": n.CutFrom, "deaf-to": n.DeafTo,
		"delay": {n.Delay.String()}, "jitter": {n.Jitter.String()}, "loss": {strconv.FormatFloat(n.Loss, 'g', -1, 64)},
	}
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/network?"+query.Encode(), nil)
}

// parseConditions reads the query of SetNetwork.
func parseConditions(query url.Values) (n network.Conditions, err error) {
	var errs [4]error
	n.CutFrom, n.DeafTo = query["cut-from"], query["deaf-to"]
	n.Off, errs[0] = strconv.ParseBool(query.Get("off"))
	n.Delay, errs[1] = time.ParseDuration(query.Get("delay"))
	n.Jitter, errs[2] = time.ParseDuration(query.Get("jitter"))
	n.Loss, errs[3] = strconv.ParseFloat(query.Get("loss"), 64)
	return n, errors.Join(append(errs[:], n.Check())...)
}

func (h *hostProcess) setNetwork(n *node, to network.Conditions) error {
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
