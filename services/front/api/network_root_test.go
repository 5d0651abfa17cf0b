package api

import (
	"bytes"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"golang.org/x/net/bpf"
	"google.golang.org/protobuf/types/known/durationpb"
)

// A capture of lo has the packets that its filter selects, whole, and ends at each of its bounds.
func TestCapture(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: opens packet sockets")
	}
	node := garboardv1connect.NewNodeServiceClient(newRig(t).serve().as(admin), host)
	here, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	defer here.Close()
	large := strings.Repeat("x", 1000)
	ended := make(chan struct{})
	sending := make(chan struct{})
	go func() {
		defer close(sending)
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			select {
			case <-ended:
				tick.Stop()
				return
			case <-tick.C:
				for _, text := range []string{large, "other"} {
					if _, err := here.WriteTo([]byte(text), here.LocalAddr()); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}()
	defer func() { close(ended); <-sending }()
	long, err := bpf.Assemble([]bpf.Instruction{ // longer than a kilobyte, IPv4, UDP
		bpf.LoadExtension{Num: bpf.ExtLen}, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: 1000, SkipFalse: 3},
		bpf.LoadAbsolute{Off: 23, Size: 1}, bpf.JumpIf{Val: 17, SkipFalse: 1}, bpf.RetConstant{Val: longestPacket}, bpf.RetConstant{},
	})
	must(t, err)
	var filter []uint64
	for _, i := range long {
		filter = append(filter, uint64(i.Op)<<48|uint64(i.Jt)<<40|uint64(i.Jf)<<32|uint64(i.K))
	}
	all, err := streamed(t, node.Capture, &apiv1.CaptureRequest{Link: "lo", Duration: durationpb.New(time.Minute), Bytes: maxCaptureBytes, Packets: 6, Filter: filter})
	must(t, err)
	if len(all) != 7 {
		t.Errorf("there are %d messages, want 6 packets and the end", len(all))
	}
	for _, m := range all[:len(all)-1] {
		if !bytes.HasSuffix(m.Data, []byte(large)) || time.Since(m.Time.AsTime()) > time.Minute {
			t.Errorf("a packet is of %s: %q", m.Time.AsTime(), m.Data)
		}
	}
	all, err = streamed(t, node.Capture, &apiv1.CaptureRequest{Link: "lo", Duration: durationpb.New(time.Minute), Bytes: 5000, Filter: filter})
	must(t, err)
	if len(all) != 5 {
		t.Errorf("5000 bytes have %d messages, want 4 packets and the end", len(all))
	}
	began := time.Now()
	nothing := uint64(6) << 48 // BPF_RET
	all, err = streamed(t, node.Capture, &apiv1.CaptureRequest{Link: "lo", Duration: durationpb.New(time.Second), Bytes: 5000, Filter: []uint64{nothing}})
	must(t, err)
	if took := time.Since(began); len(all) != 1 || took < time.Second || took > 20*time.Second {
		t.Errorf("a second without packets has %d messages and took %s", len(all), took)
	}
	_, err = streamed(t, node.Capture, &apiv1.CaptureRequest{Link: "lo", Duration: durationpb.New(time.Second), Bytes: 5000, Filter: []uint64{1 << 63}})
	wantCode(t, err, connect.CodeInvalidArgument, "capture lo with this filter")
}
