package api

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// streamed are the messages of a stream, and its error.
func streamed[Req, Res any, M interface {
	*Res
	proto.Message
}](t *testing.T, method func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error), msg *Req) (all []M, err error) {
	t.Helper()
	s, err := method(t.Context(), connect.NewRequest(msg))
	must(t, err)
	defer s.Close()
	for s.Receive() {
		all = append(all, proto.CloneOf(M(s.Msg())))
	}
	return all, s.Err()
}

// The way to a host is for operators, packets are for administrators. Each call is audited, with what was asked for,
// and one that asks for too much, or for no host, is refused.
func TestNetworkIsForFew(t *testing.T) {
	t.Parallel()
	r := newRig(t).serve()
	node := func(as map[string]string) garboardv1connect.NodeServiceClient {
		return garboardv1connect.NewNodeServiceClient(r.as(as), host)
	}
	steps, err := streamed(t, node(operator).CheckNetwork, &apiv1.CheckNetworkRequest{Host: "name.example"})
	must(t, err)
	if len(steps) != 1 || steps[0].GetLayer() != "DNS" || steps[0].GetError() != "no name server has an address for name.example" {
		t.Errorf("it has %v", steps)
	}
	wantParts(t, r.audited(), "NodeService/CheckNetwork peer=jane roles=os:operator", "outcome=ok", "name.example")
	steps, err = streamed(t, node(admin).CheckNetwork, &apiv1.CheckNetworkRequest{Host: "127.0.0.1"})
	must(t, err)
	if last := steps[len(steps)-1]; last.GetLayer() != "neighbour" || last.GetError() != "" {
		t.Errorf("to itself: %v", steps)
	}
	for _, bad := range []*apiv1.CheckNetworkRequest{{}, {Host: "a b"}, {Host: "fe80::1%eth0"}, {Host: "a/b"}, {Host: "[::1]:80"}, {Host: "a", Port: 65536}} {
		_, err := streamed(t, node(admin).CheckNetwork, bad)
		wantCode(t, err, connect.CodeInvalidArgument, "is no host")
	}
	second := durationpb.New(time.Second)
	for _, bad := range []*apiv1.CaptureRequest{
		{Link: "lo", Bytes: 1, Duration: durationpb.New(5*time.Minute + 1)}, {Link: "lo", Bytes: 1}, {Link: "lo", Bytes: 1, Duration: durationpb.New(-1)},
		{Link: "lo", Duration: second, Bytes: 64<<20 + 1}, {Link: "lo", Duration: second, Bytes: 1 << 63}, {Link: "lo", Duration: second},
	} {
		_, err := streamed(t, node(admin).Capture, bad)
		wantCode(t, err, connect.CodeInvalidArgument, "a capture has a time of at most 5m0s and at most 67108864 bytes")
	}
	_, err = streamed(t, node(admin).Capture, &apiv1.CaptureRequest{Link: "none0", Bytes: 1, Duration: second})
	wantCode(t, err, connect.CodeNotFound, "no link to capture: ", "none0")
	wantParts(t, r.audited(), "NodeService/Capture peer=jane roles=os:admin", "outcome=", "none0")

	_, err = streamed(t, node(reader).CheckNetwork, &apiv1.CheckNetworkRequest{Host: "127.0.0.1"})
	wantCode(t, err, connect.CodePermissionDenied)
	for _, few := range []map[string]string{operator, reader, identity(contract.EtcdBackup)} {
		_, err = streamed(t, node(few).Capture, &apiv1.CaptureRequest{Link: "lo"})
		wantCode(t, err, connect.CodePermissionDenied)
		wantParts(t, r.audited(), "NodeService/Capture peer=jane", "permission_denied")
	}
}

// One capture runs at a time, and the next one after it.
func TestOneCaptureAtATime(t *testing.T) {
	t.Parallel()
	s := own()
	s.capturing.Lock()
	err := s.Capture(t.Context(), connect.NewRequest(&apiv1.CaptureRequest{Link: "none0", Bytes: 1, Duration: durationpb.New(time.Second)}), nil)
	wantCode(t, err, connect.CodeResourceExhausted, "another capture runs")
	s.capturing.Unlock()
	for range 2 {
		err = s.Capture(t.Context(), connect.NewRequest(&apiv1.CaptureRequest{Link: "none0", Bytes: 1, Duration: durationpb.New(time.Second)}), nil)
		wantCode(t, err, connect.CodeNotFound)
	}
}
