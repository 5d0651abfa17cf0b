//go:build kernel

package luks

import (
	"testing"

	"github.com/garboard-os/garboard/tools/testing/uml"
)

func TestMain(m *testing.M) { uml.Main(m) }
