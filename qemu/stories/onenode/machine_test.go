//go:build story && long

package onenode

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
)

func TestOneNodeInQEMU(t *testing.T) {
	c, m := story.Ready(t, "one-qemu", qemu.QEMU)
	oneNode(t, c, m)
	m = story.Marks(t)
	folder := t.TempDir()
	kill := serveNFS(t, c, folder)
	t.Run("NFS", func(t *testing.T) { shares(t, c.In(t), folder) })
	m.Reached("a pod shares a folder with this machine")
	strands(t, c, kill)
	t.Run("power off", func(t *testing.T) { powersOff(t, c.In(t)) })
}
