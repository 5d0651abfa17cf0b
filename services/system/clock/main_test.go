package clock

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/isolate"
)

// TestMain runs the tests, as root, once more in a network namespace of their
// own, where no other program uses the port of the time server.
func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }

func addrs(text ...string) []netip.Addr {
	var out []netip.Addr
	for _, t := range text {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}
