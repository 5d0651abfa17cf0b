package main

import (
	"context"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

type configService struct {
	garboardv1connect.UnimplementedConfigServiceHandler
	node *node
}

type fileService struct {
	garboardv1connect.UnimplementedFileServiceHandler
}

type logService struct {
	garboardv1connect.UnimplementedLogServiceHandler
}

type serviceService struct {
	garboardv1connect.UnimplementedServiceServiceHandler
	node *node
}

type nodeService struct {
	garboardv1connect.UnimplementedNodeServiceHandler
	node *node
}

// slow is longer than any script waits.
const slow = time.Minute

func (s nodeService) Version(ctx context.Context, _ *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	if s.node.is("slow") {
		select {
		case <-time.After(slow):
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.node.gone:
		}
	}
	return answerWith(&apiv1.VersionResponse{Version: "v0.1.0", Platform: "linux/amd64", GoVersion: "go1.26.8", Kernel: "6.18.1", Mode: "machine", Hostname: "n-" + s.node.name})
}
