//go:build story && long

package onenode

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

func TestOneNodeInQEMU(t *testing.T) {
	c := oneNode(t, "one-qemu", qemu.QEMU)
	t.Run("power off", func(t *testing.T) { powersOff(t, c.In(t)) })
}
