package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

type nodeService struct {
	garboardv1connect.UnimplementedNodeServiceHandler
	node *node
}

type imageService struct {
	garboardv1connect.UnimplementedImageServiceHandler
}

type accessService struct {
	garboardv1connect.UnimplementedAccessServiceHandler
	node *node
}

func (s nodeService) Version(ctx context.Context, _ *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	if s.node.is("slow") {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.node.gone:
		}
	}
	return answerWith(&apiv1.VersionResponse{Version: "v0.1.0", Platform: "linux/amd64", GoVersion: "go1.26.8", Kernel: "6.18.1", Mode: "machine", Hostname: "n-" + s.node.name})
}

// Status of a node that is told to be "ill" waits; of one that comes back after a
// reboot, another boot; of one that was shut down, nothing.
func (s nodeService) Status(context.Context, *connect.Request[apiv1.NodeStatusRequest]) (*connect.Response[apiv1.NodeStatusResponse], error) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	m := &apiv1.NodeStatusResponse{
		Hostname: "n-" + s.node.name, MachineType: s.node.kind, Stage: "configured", Services: 13, ServicesUp: 13, BootId: "first",
		Load1: 0.5, MemoryAvailable: 3 << 29, Uptime: durationpb.New(now), KubernetesServes: "yes",
	}
	switch s.node.mood {
	case "ill":
		m.ServicesUp, m.WaitingFor = 12, `vip: Waiting for service "etcd" to be "up"`
	case "sealed":
		m.Notices = []string{"STATE can't be opened in another machine: make a recovery key with gbctl -n ADDRESS recovery-key add"}
	case "notready":
		m.KubernetesServes, m.KubernetesLacks = "no", "Node is NotReady: container runtime network not ready"
	case "recovering": // is well the next time
		m.ServicesUp = 12
		s.node.mood = ""
	case "rebooting", "rebooting unready":
		s.node.mood = strings.Replace(s.node.mood, "rebooting", "back", 1)
	case "back":
		m.BootId = "second"
	case "back unready":
		m.BootId, m.KubernetesServes, m.KubernetesLacks = "second", "no", "Node is NotReady: container runtime network not ready"
	case "off":
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the node goes down"))
	}
	if s.node.kind == "" {
		m.Stage, m.Services, m.ServicesUp, m.KubernetesServes = "maintenance", 4, 3, ""
		if s.node.mood == "locked" {
			m.Stage = "locked"
		}
	}
	return answerWith(m)
}

func (s *operationService) Reboot(_ context.Context, r *connect.Request[apiv1.RebootRequest]) (*connect.Response[apiv1.RebootResponse], error) {
	mood := "rebooting"
	if s.node.is("notready") || s.node.is("unserved") {
		mood += " unready"
	}
	o, err := s.node.operate("reboot", mood, r.Msg.DryRun)
	return connect.NewResponse(&apiv1.RebootResponse{Operation: o}), err
}

func (s *operationService) Shutdown(_ context.Context, r *connect.Request[apiv1.ShutdownRequest]) (*connect.Response[apiv1.ShutdownResponse], error) {
	o, err := s.node.operate("shutdown", "off", r.Msg.DryRun)
	return connect.NewResponse(&apiv1.ShutdownResponse{Operation: o}), err
}

// Reset is refused by a node that is the last member of etcd, unless it is forced.
func (s *operationService) Reset(_ context.Context, r *connect.Request[apiv1.ResetRequest]) (*connect.Response[apiv1.ResetResponse], error) {
	if s.node.is("last") && !r.Msg.Force {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("reset: remove etcd member n1 (8e9e): it is the last voting member"))
	}
	mood := "off"
	if r.Msg.Reboot && len(r.Msg.SystemLabelsToWipe) > 0 {
		mood = "rebooting"
	}
	o, err := s.node.operate("reset", mood, r.Msg.DryRun)
	if err != nil {
		return nil, err
	}
	o.Warnings = []string{fmt.Sprintf("wipes %v, reboots %v, drains for %s", r.Msg.SystemLabelsToWipe, r.Msg.Reboot, r.Msg.DrainTimeout.AsDuration())}
	for _, disk := range r.Msg.UserDisksToWipe {
		o.Warnings = append(o.Warnings, "wipes "+disk)
	}
	return answerWith(&apiv1.ResetResponse{Operation: o})
}

// UpgradeSystem of a node that is told to be "sick", or where Kubernetes won't serve with the new system ("unserved"),
// ends with the former system.
func (s *operationService) UpgradeSystem(_ context.Context, r *connect.Request[apiv1.UpgradeSystemRequest]) (*connect.Response[apiv1.UpgradeSystemResponse], error) {
	m := r.Msg
	if m.Wipe && (m.Force || m.Stage) {
		return replay[apiv1.UpgradeSystemResponse]("OperationService/UpgradeSystem", m)
	}
	reverts := ""
	if s.node.is("sick") && !m.DryRun {
		reverts = "the kernel has panicked"
	} else if s.node.is("unserved") && !m.DryRun {
		reverts = "not healthy within 10m0s: Node is NotReady: container runtime network not ready"
	}
	o, err := s.node.operate("upgrade", "rebooting", m.DryRun || m.Stage)
	if err != nil {
		return nil, err
	}
	if m.Stage {
		o.Id = "upgrade-staged"
	}
	if reverts != "" {
		s.node.operations.reverted.Store(&reverts)
	}
	o.Warnings = []string{fmt.Sprintf("image %q, wipes %v, stages %v, keeps pods %v, drains for %s", m.Image, m.Wipe, m.Stage, m.KeepPods, m.DrainTimeout.AsDuration())}
	return answerWith(&apiv1.UpgradeSystemResponse{Operation: o})
}

// RollbackSystem is refused by a node whose other system isn't good ("bad").
func (s *operationService) RollbackSystem(_ context.Context, r *connect.Request[apiv1.RollbackSystemRequest]) (*connect.Response[apiv1.RollbackSystemResponse], error) {
	if s.node.is("bad") {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("roll back to slot B: it is empty"))
	}
	o, err := s.node.operate("rollback", "rebooting", r.Msg.DryRun)
	return connect.NewResponse(&apiv1.RollbackSystemResponse{Operation: o}), err
}

func (s *operationService) InstallSystem(_ context.Context, r *connect.Request[apiv1.InstallSystemRequest]) (*connect.Response[apiv1.InstallSystemResponse], error) {
	o, err := s.node.operate("install", "rebooting", r.Msg.DryRun)
	if err != nil {
		return nil, err
	}
	o.Warnings = []string{fmt.Sprintf("image %q, forced %v", r.Msg.Image, r.Msg.Force)}
	return answerWith(&apiv1.InstallSystemResponse{Operation: o})
}

// operate is an operation whose node then is in a mood.
func (n *node) operate(name, mood string, dryRun bool) (*apiv1.Operation, error) {
	o, err := recordedOperation(name)
	if err == nil && !dryRun {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.mood, o.Id = mood, name+"-now"
	}
	return o, err
}

func (nodeService) Processes(context.Context, *connect.Request[apiv1.ProcessesRequest]) (*connect.Response[apiv1.ProcessesResponse], error) {
	return answerWith(&apiv1.ProcessesResponse{Processes: []*apiv1.Process{
		{Pid: 1, State: "S", Threads: 12, CpuTime: durationpb.New(1530 * time.Millisecond), VirtualMemory: 1 << 30, ResidentMemory: 30 << 20, Command: "init", Args: "/sbin/init"},
		{Pid: 2334, Ppid: 900, State: "R", Threads: 15, CpuTime: durationpb.New(time.Second), VirtualMemory: 2 << 30, ResidentMemory: 90 << 20, Command: "kubelet", Args: "/usr/local/bin/kubelet --config=/etc/kubernetes/kubelet.yaml"},
	}})
}

func (nodeService) Memory(context.Context, *connect.Request[apiv1.MemoryRequest]) (*connect.Response[apiv1.MemoryResponse], error) {
	return answerWith(&apiv1.MemoryResponse{Meminfo: map[string]uint64{"MemTotal": 4 << 30, "MemAvailable": 3 << 30, "MemFree": 2 << 30, "Buffers": 1 << 20, "Cached": 1 << 30}, Pid1Pss: 25 << 20})
}

func (nodeService) Mounts(context.Context, *connect.Request[apiv1.MountsRequest]) (*connect.Response[apiv1.MountsResponse], error) {
	return answerWith(&apiv1.MountsResponse{Mounts: []*apiv1.Mount{
		{Source: "/dev/vda6", Target: "/var", Type: "xfs", Options: "rw", Size: 10 << 30, Available: 4 << 30},
		{Source: "proc", Target: "/proc", Type: "proc", Options: "rw"},
	}})
}

func (nodeService) Disks(context.Context, *connect.Request[apiv1.DisksRequest]) (*connect.Response[apiv1.DisksResponse], error) {
	return answerWith(&apiv1.DisksResponse{Disks: []*apiv1.Disk{
		{Device: "/dev/vda", Size: 10 << 30, Model: "QEMU HARDDISK", Serial: "gb-1", Bus: "virtio", System: true, Content: "Garboard"},
		{Device: "/dev/sr0", Size: 60 << 20, Bus: "ata", ReadOnly: true, Content: "empty"},
	}})
}

func (nodeService) Netstat(_ context.Context, r *connect.Request[apiv1.NetstatRequest]) (*connect.Response[apiv1.NetstatResponse], error) {
	m := &apiv1.NetstatResponse{Sockets: []*apiv1.Socket{{Protocol: "tcp6", Local: "[::]:50000", Remote: "[::]:0", State: "LISTEN", Pid: 700, Command: "apid"}}}
	if !r.Msg.ListeningOnly {
		m.Sockets = append(m.Sockets, &apiv1.Socket{Protocol: "tcp", Local: "10.5.0.2:50000", Remote: "10.5.0.1:51234", State: "ESTABLISHED", SendQueue: 12})
	}
	return answerWith(m)
}

func (nodeService) Time(context.Context, *connect.Request[apiv1.TimeRequest]) (*connect.Response[apiv1.TimeResponse], error) {
	return answerWith(&apiv1.TimeResponse{Now: at(now), Synced: true, Server: "pool.ntp.org", Offset: durationpb.New(-1200 * time.Microsecond), Error: durationpb.New(4 * time.Millisecond), Message: "in step"})
}

func (nodeService) SetTime(_ context.Context, r *connect.Request[apiv1.SetTimeRequest]) (*connect.Response[apiv1.SetTimeResponse], error) {
	to := r.Msg.Time.AsTime()
	if time.Since(to).Abs() < time.Minute {
		return answerWith(&apiv1.SetTimeResponse{Message: "the clock is set to the time of the client"})
	}
	return answerWith(&apiv1.SetTimeResponse{Message: "the clock is set to " + to.Format(time.RFC3339)})
}

func (nodeService) Containers(_ context.Context, r *connect.Request[apiv1.ContainersRequest]) (*connect.Response[apiv1.ContainersResponse], error) {
	if !r.Msg.Kubernetes {
		return answerWith(&apiv1.ContainersResponse{Containers: []*apiv1.Container{{Namespace: "system", Id: "etcd", Image: "registry.k8s.io/etcd:3.6.8-0", Pid: 2343, Status: "CONTAINER_RUNNING"}}})
	}
	return answerWith(&apiv1.ContainersResponse{Containers: []*apiv1.Container{
		{Namespace: "k8s.io", Id: "kube-system/kube-apiserver-cp-1", Image: "registry.k8s.io/pause:3.10.1", Pid: 2539, Status: "SANDBOX_READY"},
		{Namespace: "k8s.io", Id: "kube-system/kube-apiserver-cp-1:kube-apiserver", Image: "registry.k8s.io/kube-apiserver:v1.37.2", Pid: 2572, Status: "CONTAINER_RUNNING", InPod: true},
	}})
}

func (imageService) List(context.Context, *connect.Request[apiv1.ImagesRequest]) (*connect.Response[apiv1.ImagesResponse], error) {
	return answerWith(&apiv1.ImagesResponse{Images: []*apiv1.ContainerImage{
		{Namespace: "system", Name: "registry.k8s.io/etcd:3.6.8-0", Digest: "sha256:0123456789abcdef0123456789abcdef", Size: 60 << 20, Created: at(time.Minute)},
	}})
}

func (imageService) Remove(_ context.Context, r *connect.Request[apiv1.RemoveImagesRequest]) (*connect.Response[apiv1.RemoveImagesResponse], error) {
	if !r.Msg.Kubernetes {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("image in use: %s, by container etcd", r.Msg.Images[0]))
	}
	return answerWith(&apiv1.RemoveImagesResponse{Removed: r.Msg.Images})
}

func (imageService) Pull(_ context.Context, r *connect.Request[apiv1.PullImageRequest], stream *connect.ServerStream[apiv1.PullImageProgress]) error {
	if r.Msg.Image == "missing:1" {
		return connect.NewError(connect.CodeNotFound, errors.New("pull image missing:1: not found"))
	}
	for _, p := range []*apiv1.PullImageProgress{{Done: 1 << 20, Total: 3 << 20}, {Done: 1 << 20, Total: 3 << 20}, {Digest: fmt.Sprint("sha256:for-pods-", r.Msg.Kubernetes)}} {
		if err := stream.Send(p); err != nil {
			return err
		}
	}
	return nil
}

func (imageService) Check(_ context.Context, r *connect.Request[apiv1.CheckImagesRequest], stream *connect.ServerStream[apiv1.ImageCheck]) error {
	for _, image := range append([]string{"registry.k8s.io/etcd:3.6.8-0"}, r.Msg.Images...) {
		check := &apiv1.ImageCheck{Image: image, Digest: "sha256:0123456789abcdef0123456789abcdef", Here: image == "registry.k8s.io/etcd:3.6.8-0"}
		if image == "missing:1" {
			check.Digest, check.Error = "", "pull image missing:1: not found"
		}
		if err := stream.Send(check); err != nil {
			return err
		}
	}
	return nil
}

func (nodeService) BootChart(_ context.Context, r *connect.Request[apiv1.BootChartRequest]) (*connect.Response[apiv1.BootChartResponse], error) {
	if r.Msg.Svg {
		return answerWith(&apiv1.BootChartResponse{Chart: []byte("<svg/>\n")})
	}
	return answerWith(&apiv1.BootChartResponse{Chart: []byte("kubelet ####\n")})
}

// firstAdmin is the certificate in the kubeconfig of whoever asks for no other.
var firstAdmin = sync.OnceValues(func() (string, error) {
	return kubeClient(config.Access{User: "admin", Groups: []string{"system:masters"}, Validity: 365 * 24 * time.Hour})
})

// kubeClient is a certificate for Kubernetes, as in a kubeconfig.
func kubeClient(who config.Access) (string, error) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		return "", err
	}
	crt, _, err := ca.Issue(pki.Leaf{CN: who.User, Orgs: who.Groups, Validity: who.Validity, Client: true, Now: time.Now()})
	return base64.StdEncoding.EncodeToString(crt), err
}

// Kubeconfig of a node that is "old" knows one administrator only.
func (s accessService) Kubeconfig(_ context.Context, r *connect.Request[apiv1.KubeconfigRequest]) (*connect.Response[apiv1.KubeconfigResponse], error) {
	if s.node.kind != "controlplane" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("a worker doesn't hold the cluster's authority: ask a control plane"))
	}
	who, err := config.Access{User: r.Msg.User, Groups: r.Msg.Groups, Validity: r.Msg.Ttl.AsDuration()}.Complete()
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	crt, err := firstAdmin()
	if err == nil && !s.node.is("old") && (who.User != "admin" || who.Groups[0] != "system:masters") {
		crt, err = kubeClient(who)
	}
	if err != nil {
		return nil, err
	}
	text := strings.NewReplacer("$USER", who.User, "$CRT", crt).Replace(`apiVersion: v1
kind: Config
clusters:
  - name: home
    cluster:
      server: https://10.5.0.2:6443
      certificate-authority-data: Q0E=
users:
  - name: $USER@home
    user:
      client-certificate-data: $CRT
      client-key-data: S0VZ
contexts:
  - name: $USER@home
    context:
      cluster: home
      user: $USER@home
      namespace: default
current-context: $USER@home
`)
	return answerWith(&apiv1.KubeconfigResponse{Kubeconfig: []byte(text)})
}

// CreateToken makes one that is the same in each test.
func (s accessService) CreateToken(_ context.Context, r *connect.Request[apiv1.CreateTokenRequest]) (*connect.Response[apiv1.CreateTokenResponse], error) {
	if s.node.is("alone") {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("create /v1/Secret/bootstrap-token-q9pyzr: connection refused"))
	}
	return answerWith(&apiv1.CreateTokenResponse{Token: "q9pyzr.0123456789abcdef", Ends: timestamppb.New(time.Now().Add(r.Msg.Ttl.AsDuration()))})
}

func (accessService) ListTokens(context.Context, *connect.Request[apiv1.ListTokensRequest]) (*connect.Response[apiv1.ListTokensResponse], error) {
	return answerWith(&apiv1.ListTokensResponse{Tokens: []*apiv1.JoinToken{
		{Id: "aaaaaa", Ends: timestamppb.New(time.Date(2126, 1, 2, 3, 4, 5, 0, time.UTC)), Description: "rack 4\x1b"},
		{Id: "bbbbbb", Description: "cluster.token of this node"},
		{Id: "cccccc", Ends: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))},
	}})
}

func (accessService) RevokeToken(_ context.Context, r *connect.Request[apiv1.RevokeTokenRequest]) (*connect.Response[apiv1.RevokeTokenResponse], error) {
	return answerWith(&apiv1.RevokeTokenResponse{Message: fmt.Sprintf("token %s ends after %s", r.Msg.Id, r.Msg.After.AsDuration())})
}

var findings = []*apiv1.Finding{
	{
		Severity: apiv1.Finding_SEVERITY_ERROR, Id: "etcd-not-running", What: "etcd isn't running.", Why: "The cluster was never bootstrapped.",
		Next: "Run 'gbctl -n 10.5.0.2 bootstrap' once.", Evidence: []string{`service etcd: Waiting for service "containerd"`}, Since: at(time.Minute),
	},
	{Severity: apiv1.Finding_SEVERITY_INFO, Id: "node-not-ready", What: "The node isn't ready."},
}

func (s nodeService) Diagnose(context.Context, *connect.Request[apiv1.DiagnoseRequest]) (*connect.Response[apiv1.DiagnoseResponse], error) {
	m := &apiv1.DiagnoseResponse{Checked: []string{"services", "certificates"}}
	if s.node.is("ill") {
		m.Findings = findings
	}
	return answerWith(m)
}

func (s nodeService) CheckNetwork(_ context.Context, r *connect.Request[apiv1.CheckNetworkRequest], stream *connect.ServerStream[apiv1.NetworkStep]) error {
	m := r.Msg
	steps := []*apiv1.NetworkStep{
		{Layer: "DNS", Result: "10.5.0.1 says [10.5.0.9]", Took: durationpb.New(12 * time.Millisecond)},
		{Layer: "TCP", Result: "connected from 10.5.0.2:4000", Took: durationpb.New(0)},
	}
	switch {
	case m.Port == 0:
		steps = steps[:1]
	case m.Host == "silent.example":
		steps[1].Result, steps[1].Error = "", "connection refused"
	}
	for _, step := range steps {
		if err := stream.Send(step); err != nil {
			return err
		}
	}
	return nil
}

func (s nodeService) Capture(_ context.Context, r *connect.Request[apiv1.CaptureRequest], stream *connect.ServerStream[apiv1.CapturedPacket]) error {
	if r.Msg.Link != "eth0" {
		return connect.NewError(connect.CodeNotFound, errors.New("no link to capture: "+r.Msg.Link))
	}
	text := fmt.Sprintf("%s with a filter of %d for %s", r.Msg.Link, len(r.Msg.Filter), r.Msg.Duration.AsDuration())
	if err := stream.Send(&apiv1.CapturedPacket{Time: timestamppb.Now(), Data: []byte(text)}); err != nil {
		return err
	}
	return stream.Send(&apiv1.CapturedPacket{Lost: 3})
}
