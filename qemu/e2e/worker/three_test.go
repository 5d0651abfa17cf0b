//go:build e2e && long

package worker

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// Three control planes decide as one: a thief who is refused by one asks the others, and what one of them recorded
// about a name is so on all.
func TestTakenWorkerOfThree(t *testing.T) {
	c, m := e2etest.Ready(t, "taken", qemu.Container, e2etest.Nodes(3, 1))
	worker := c.Nodes[3]
	for _, control := range c.Nodes[:3] {
		t.Run("asks "+control.Name, func(t *testing.T) { taken(t, c.In(t), control, worker) })
		m.Reached(control.Name + " was attacked")
	}
	t.Run("taints", func(t *testing.T) { tainted(t, c.In(t), worker) })
	t.Run("tokens end", func(t *testing.T) { ended(t, c.In(t), c.Nodes[1], worker) })
	t.Run("its Node is deleted", func(t *testing.T) { nodeDeleted(t, c.In(t), worker) })
}
