//go:build e2e

package e2etest

import (
	"slices"
	"testing"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/selfhosted"
)

// SelfHosted makes a cluster whose nodes can pull the image of the pod-checkpointer. SelfHost
// then makes its control plane self-hosted. others are other optional components.
func SelfHosted(t testing.TB, others ...string) Option {
	t.Helper()
	a, err := build(image.BuildRoot, image.Cloud, slices.Concat(further, others)...)
	if err != nil {
		t.Fatalf("build the pod-checkpointer: %v", err)
	}
	return func(o *qemu.Options) { o.SelfHosted, o.Images = true, a.Layout }
}

// SelfHost makes the control plane of a new cluster self-hosted, as gbctl cluster create
// --self-hosted does. The cluster must be Ready. All nodes reboot once.
func (c *Cluster) SelfHost() {
	c.t.Helper()
	c.Healthy() // a node is Ready before each of its static pods is
	if err := selfhosted.Convert(c.t.Context(), c.Cluster, c.t.Output()); err != nil {
		c.t.Fatal(err)
	}
}
