//go:build e2e && long

package onenode

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestOneNodeInQEMU(t *testing.T) {
	c, m := e2etest.Ready(t, "one-qemu", qemu.QEMU)
	oneNode(t, c, m)
	m = e2etest.Marks(t)
	folder := t.TempDir()
	kill := serveNFS3(t, c, folder)
	serveNFS4(t, c, folder)
	t.Run("S360NFS3", func(t *testing.T) { shares(t, c.In(t), folder, "shared", nfs3) })
	t.Run("S360NFS4", func(t *testing.T) { shares(t, c.In(t), folder, "shared4", nfs4) })
	m.Reached("a pod shares a folder with this machine")
	strands(t, c, kill)
	t.Run("power off", func(t *testing.T) { powersOff(t, c.In(t)) })
}
