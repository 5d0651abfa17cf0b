package api

import (
	"context"
	"errors"
	"net"
	"os"
	"regexp"
	"time"

	"connectrpc.com/connect"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/netcheck"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/outbound"
)

// CheckNetwork tries the way to a host.
func (s *nodeService) CheckNetwork(ctx context.Context, req *connect.Request[apiv1.CheckNetworkRequest], stream *connect.ServerStream[apiv1.NetworkStep]) error {
	host, port := req.Msg.GetHost(), req.Msg.GetPort()
	if !plainHost.MatchString(host) || len(host) > 253 || port > 65535 {
		return failed(connect.CodeInvalidArgument, "%q with port %d is no host: a name, or an address without a zone, and a port of at most 65535", shortened(readable(host)), port)
	}
	trusted, err := outbound.Authorities(boot.CABundle, nil)
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	servers, _ := network.Resolvers.Get(s.opts.Store, network.ResolversID) // none before networkd has some
	c := netcheck.Check{Host: host, Port: uint16(port), Servers: servers.Spec, Trusted: trusted, Tell: stream.Send}
	return c.Run(ctx)
}

// plainHost is an address without a zone, or can be a name in DNS if it has at most 253 characters (RFC 1035 §2.3.4):
// as a number of repetitions in the expression, they would take 200 KB in PID 1 and in each of its helpers.
var plainHost = regexp.MustCompile(`^[0-9A-Za-z._:-]+$`)

// Bounds of a capture.
const (
	maxCaptureTime  = 5 * time.Minute
	maxCaptureBytes = 64 << 20
	longestPacket   = 256 << 10 // cards with large receive offload have some of 64 KiB and more
)

// Capture streams packets. The kernel checks the filter of the client, and selects them by it.
func (s *nodeService) Capture(ctx context.Context, req *connect.Request[apiv1.CaptureRequest], stream *connect.ServerStream[apiv1.CapturedPacket]) error {
	r := req.Msg
	most, left := r.GetDuration().AsDuration(), int(min(r.GetBytes(), maxCaptureBytes+1))
	if most <= 0 || most > maxCaptureTime || left == 0 || left > maxCaptureBytes {
		return failed(connect.CodeInvalidArgument, "a capture has a time of at most %s and at most %d bytes", maxCaptureTime, maxCaptureBytes)
	}
	if !s.capturing.TryLock() {
		return failed(connect.CodeResourceExhausted, "another capture runs on the node")
	}
	defer s.capturing.Unlock()
	link, err := net.InterfaceByName(r.GetLink())
	if err != nil || len(link.HardwareAddr) != 6 && link.Flags&net.FlagLoopback == 0 {
		return failed(connect.CodeNotFound, "no link to capture: %s isn't there, or isn't Ethernet", shortened(readable(r.GetLink())))
	}
	var filter []bpf.RawInstruction
	for _, i := range r.GetFilter() {
		filter = append(filter, bpf.RawInstruction{Op: uint16(i >> 48), Jt: uint8(i >> 40), Jf: uint8(i >> 32), K: uint32(i)})
	}
	c, err := packet.Listen(link, packet.Raw, unix.ETH_P_ALL, &packet.Config{Filter: filter})
	if err != nil {
		return failed(connect.CodeInvalidArgument, "capture %s with this filter: %v", link.Name, err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	frame := make([]byte, longestPacket)
	for n := uint64(0); r.GetPackets() == 0 || n < r.GetPackets(); n++ {
		size, _, err := c.ReadFrom(frame)
		if left -= size; left < 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err == nil {
			err = stream.Send(&apiv1.CapturedPacket{Time: timestamppb.Now(), Data: frame[:size]})
		}
		if err != nil {
			return err
		}
	}
	stats, err := c.Stats()
	if err != nil {
		return err
	}
	return stream.Send(&apiv1.CapturedPacket{Lost: uint64(stats.Drops)})
}
