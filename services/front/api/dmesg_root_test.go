package api

import (
	"os"
	"testing"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
)

// TestTheRealKernelLog reads what the kernel has; a pipe isn't all like it.
func TestTheRealKernelLog(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	r := newRig(t)
	r.opts.Mode, r.opts.Kmsg = boot.Machine, defaultKmsg
	r.serve()
	stream, err := r.logs().Dmesg(t.Context(), connect.NewRequest(&apiv1.DmesgRequest{Tail: 5}))
	must(t, err)
	n := 0
	for stream.Receive() {
		if n++; stream.Msg().GetMessage() == "" || stream.Msg().GetTime() == nil {
			t.Errorf("got %v", stream.Msg())
		}
	}
	// where root isn't all of it
	if code := connect.CodeOf(stream.Err()); stream.Err() != nil && code != connect.CodeUnavailable {
		t.Error(stream.Err())
	}
	if n > 5 {
		t.Errorf("%d messages", n)
	}
	t.Logf("%d messages, %v", n, stream.Err())
}
