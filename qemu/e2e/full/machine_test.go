//go:build e2e && long

package full

import (
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

func TestFullEphemeralInQEMU(t *testing.T) { full(t, "full-qemu", qemu.QEMU) }
