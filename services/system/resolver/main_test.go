package resolver

import (
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/isolate"
)

// TestMain runs the tests, as root, in a network namespace of their own.
func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }
