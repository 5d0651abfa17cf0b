package vip

import (
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/isolate"
)

// TestMain runs the tests, as root, once more in a network namespace of their
// own, so that the links of this machine don't change.
func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }
