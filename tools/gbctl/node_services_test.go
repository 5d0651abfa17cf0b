package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/sbom"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// booted is when the kernels of all nodes were started.
var booted = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(since time.Duration) *timestamppb.Timestamp { return timestamppb.New(booted.Add(since)) }

type serviceService struct {
	garboardv1connect.UnimplementedServiceServiceHandler
	node *node
}

// now is when nodes are asked, since their boot.
const now = 4 * time.Minute

func (s serviceService) List(_ context.Context, r *connect.Request[apiv1.ListServicesRequest]) (*connect.Response[apiv1.ListServicesResponse], error) {
	return replay[apiv1.ListServicesResponse]("ServiceService/List", r.Msg)
}

func (s serviceService) Control(_ context.Context, r *connect.Request[apiv1.ControlServiceRequest]) (*connect.Response[apiv1.ControlServiceResponse], error) {
	return replay[apiv1.ControlServiceResponse]("ServiceService/Control", r.Msg)
}

// Events are those of the kubelet.
func (s serviceService) Events(_ context.Context, r *connect.Request[apiv1.EventsRequest], stream *connect.ServerStream[apiv1.ServiceEvent]) error {
	m, err := replay[apiv1.ListServicesResponse]("ServiceService/List", &apiv1.ListServicesRequest{Id: "kubelet", Events: shownEvents})
	if err != nil {
		return err
	}
	events := m.Msg.Services[0].Events
	for i := int(min(r.Msg.Tail, uint32(len(events)))) - 1; i >= 0; i-- {
		if err := stream.Send(events[i]); err != nil {
			return err
		}
	}
	return nil
}

type logService struct {
	garboardv1connect.UnimplementedLogServiceHandler
	node *node
}

func (logService) List(_ context.Context, r *connect.Request[apiv1.ListLogsRequest]) (*connect.Response[apiv1.ListLogsResponse], error) {
	if r.Msg.Kubernetes {
		return answerWith(&apiv1.ListLogsResponse{Ids: []string{"kube-system/kube-apiserver-cp-1:kube-apiserver"}})
	}
	return replay[apiv1.ListLogsResponse]("LogService/List", r.Msg)
}

func (s logService) Read(ctx context.Context, r *connect.Request[apiv1.ReadLogRequest], stream *connect.ServerStream[apiv1.LogChunk]) error {
	known, err := s.List(ctx, connect.NewRequest(&apiv1.ListLogsRequest{Kubernetes: r.Msg.Kubernetes}))
	if err != nil {
		return err
	}
	if !slices.Contains(append(known.Msg.Ids, "endless"), r.Msg.Id) { // as services/front/api
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no log %q; there are %s; logs of containers are namespace/pod:container", r.Msg.Id, strings.Join(known.Msg.Ids, ", ")))
	}
	lines := []string{"one", "two \x1b[31m", "three"}
	if r.Msg.Kubernetes {
		lines = []string{"2026-11-21T12:00:13.133902064Z stderr F Running command:"}
	}
	if r.Msg.Previous {
		lines = []string{"earliest line", "earlier line"}
	}
	if r.Msg.Boot != 0 {
		lines = []string{"the first", fmt.Sprintf("the last of boot %d", r.Msg.Boot)}
	}
	if r.Msg.Tail != 0 {
		lines = lines[len(lines)-int(max(r.Msg.Tail, 0)):]
	}
	if err := stream.Send(&apiv1.LogChunk{Lines: lines, Lost: 7}); err != nil || !r.Msg.Follow {
		return err
	}
	if s.node.name == nodeWorker {
		return nil // goes down
	}
	if r.Msg.Id == "endless" {
		s.node.reading <- struct{}{}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.node.gone:
		}
	}
	return stream.Send(&apiv1.LogChunk{Lines: []string{"more"}})
}

func (logService) Dmesg(_ context.Context, _ *connect.Request[apiv1.DmesgRequest], stream *connect.ServerStream[apiv1.KernelMessage]) error {
	lines, err := consoleLines()
	for _, line := range lines {
		if err == nil {
			err = stream.Send(&apiv1.KernelMessage{Level: 6, Time: at(70 * time.Second), SinceBootUs: 70093289, Message: line})
		}
	}
	return err
}

type fileService struct {
	garboardv1connect.UnimplementedFileServiceHandler
	node *node
}

func (fileService) List(_ context.Context, r *connect.Request[apiv1.ListFilesRequest], stream *connect.ServerStream[apiv1.FileInfo]) error {
	if r.Msg.Path == "/proc/sys/net/core" {
		return stream.Send(&apiv1.FileInfo{Name: "somaxconn", Mode: "-rw-r--r--"})
	}
	if r.Msg.Path != "/etc/kubernetes/manifests" {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("%s: no such file or directory", r.Msg.Path))
	}
	for _, f := range []*apiv1.FileInfo{
		{Name: ".", Mode: "drwxr-xr-x", Modified: at(time.Minute), Size: 80},
		{Name: "garboard-kube-apiserver.yaml", Mode: "-rw-------", Modified: at(2 * time.Minute), Size: 4096},
		{Name: "current", Mode: "Lrwxrwxrwx", Link: "garboard-kube-apiserver.yaml"},
	} {
		if err := stream.Send(f); err != nil {
			return err
		}
	}
	return nil
}

func (fileService) Read(_ context.Context, r *connect.Request[apiv1.ReadFileRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	switch r.Msg.Path {
	case "/" + sbom.File:
		return stream.Send(&apiv1.FileChunk{Data: []byte(`{"spdxVersion": "SPDX-2.3"}` + "\n")})
	case "/" + customize.ProvenanceFile:
		return connect.NewError(connect.CodeNotFound, errors.New(r.Msg.Path+": no such file or directory"))
	}
	for _, part := range []string{"raw ", "bytes\n"} {
		if err := stream.Send(&apiv1.FileChunk{Data: []byte(part)}); err != nil {
			return err
		}
	}
	if r.Msg.Path == "/broken" {
		return connect.NewError(connect.CodeInternal, errors.New("read /broken: input/output error"))
	}
	return nil
}

// archives are what nodes send, by the path that they are asked for.
var archives = map[string][]tar.Header{
	"/var/log": {
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./pods/", Typeflag: tar.TypeDir, Mode: 0o500},
		{Name: "./pods/a.log", Typeflag: tar.TypeReg, Mode: 0o4640, Size: 3},
		{Name: "./now", Typeflag: tar.TypeSymlink, Linkname: "pods/a.log"},
		{Name: "./same", Typeflag: tar.TypeLink, Linkname: "./pods/a.log"},
		{Name: "./null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
	},
	"/partly": {
		{Name: "partly/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "partly/f", Typeflag: tar.TypeReg, Mode: 0o400, Size: 3},
		{Name: problemsName, Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
	},
	"/hostname":   {{Name: "hostname", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
	"/up":         {{Name: "../up", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
	"/absolute":   {{Name: "/tmp/gbctl-absolute", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
	"/through":    {{Name: "out", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "out/through", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
	"/replace":    {{Name: "f", Typeflag: tar.TypeSymlink, Linkname: "../victim"}, {Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
	"/hard":       {{Name: "f", Typeflag: tar.TypeLink, Linkname: "../victim"}},
	"/incomplete": {{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}, {Name: "g", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}},
}

func (fileService) Copy(_ context.Context, r *connect.Request[apiv1.CopyFilesRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	headers, ok := archives[r.Msg.Path]
	if !ok {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("%s: no such file or directory", r.Msg.Path))
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		h.ModTime = booted
		if err := w.WriteHeader(&h); err != nil {
			return err
		}
		if h.Size > 0 {
			fmt.Fprint(w, "abc")
		}
	}
	if r.Msg.Path == "/incomplete" {
		if err := stream.Send(&apiv1.FileChunk{Data: b.Bytes()[:b.Len()-1]}); err != nil {
			return err
		}
		return connect.NewError(connect.CodeInternal, errors.New("read /incomplete/g: input/output error"))
	}
	if err := w.Close(); err != nil {
		return err
	}
	for chunk := b.Bytes(); len(chunk) > 0; {
		n := min(1000, len(chunk)) // as they come, not as the archive's blocks are
		if err := stream.Send(&apiv1.FileChunk{Data: chunk[:n]}); err != nil {
			return err
		}
		chunk = chunk[n:]
	}
	return nil
}
