package api

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/volumes"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const maxLastExit = 4 << 10 // bytes of boot.ExitFile

// nodeService is the node itself.
type nodeService struct {
	opts Options
	root string // what paths are below; tests have their own
	boot string // tells this boot of a container from others; "" on a machine, whose kernel does
	// hanging are the paths of file systems that don't answer.
	hanging sync.Map
	// capturing is locked while a capture runs: each one has buffers of its own.
	capturing sync.Mutex
}

func newNodeService(o Options) *nodeService {
	s := &nodeService{opts: o, root: "/"}
	if o.Mode == boot.Container {
		s.boot = rand.Text()
	}
	return s
}

// path is where something of the node is.
func (s *nodeService) path(name string) string { return filepath.Join(s.root, name) }

func (s *nodeService) proc() (procfs.FS, error) { return procfs.NewFS(s.path("proc")) }

func (s *nodeService) Version(context.Context, *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	return connect.NewResponse(&apiv1.VersionResponse{
		Version: boot.Version, Platform: runtime.GOOS + "/" + runtime.GOARCH, GoVersion: runtime.Version(),
		Kernel: kernelRelease(), Mode: s.opts.Mode.String(), Hostname: s.hostname(),
	}), nil
}

// kernelRelease is as uname(2) has it; "" never happens.
func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// hostname is the kernel's until the node has chosen its own.
func (s *nodeService) hostname() string {
	if o, err := network.Hostnames.Get(s.opts.Store, network.HostnameID); err == nil {
		return o.Spec
	}
	name, _ := os.Hostname()
	return name
}

func (s *nodeService) Status(context.Context, *connect.Request[apiv1.NodeStatusRequest]) (*connect.Response[apiv1.NodeStatusResponse], error) {
	res := &apiv1.NodeStatusResponse{
		Hostname: s.hostname(), Version: boot.Version, Uptime: durationpb.New(s.opts.Since()), Cpus: uint32(runtime.NumCPU()),
		LastExit: readable(s.text(boot.ExitFile)),
		BootId:   cmp.Or(s.boot, s.text("/proc/sys/kernel/random/boot_id")),
	}
	if stage, err := configuration.Stages.Get(s.opts.Store, configuration.StageID); err == nil {
		res.Stage = string(stage.Spec)
	}
	if c, err := configuration.Config(s.opts.Store); err == nil {
		res.MachineType, res.Cluster, res.Endpoint = string(c.Machine.Type), c.Cluster.Name, c.Cluster.ControlPlane.Endpoint.String()
	}
	if a, err := network.Addresses.Get(s.opts.Store, network.AddressID); err == nil {
		res.Addresses = append(res.Addresses, a.Spec.Primary.String())
		for _, prefix := range a.Spec.All {
			if prefix.Addr() != a.Spec.Primary {
				res.Addresses = append(res.Addresses, prefix.Addr().String())
			}
		}
	}
	fs, err := s.proc()
	if err != nil {
		return nil, err
	}
	if load, err := fs.LoadAvg(); err == nil {
		res.Load1, res.Load5, res.Load15 = load.Load1, load.Load5, load.Load15
	}
	if m, err := fs.Meminfo(); err == nil {
		res.MemoryTotal, res.MemoryAvailable = number(m.MemTotalBytes), number(m.MemAvailableBytes)
	}
	var st unix.Statfs_t
	if unix.Statfs(s.path(boot.EphemeralDir), &st) == nil {
		res.EphemeralTotal, res.EphemeralAvailable = st.Blocks*uint64(st.Bsize), st.Bavail*uint64(st.Bsize)
	}
	var waiting []string
	for _, status := range s.opts.Graph.Statuses() {
		res.Services++
		if status.Up {
			res.ServicesUp++
		} else {
			waiting = append(waiting, status.ID+": "+status.Message)
		}
		if status.Up && status.Lacks != "" {
			waiting = append(waiting, status.ID+": "+status.Waiting)
		}
	}
	waiting = append(waiting, controlplane.Unready(s.opts.Store)...)
	res.WaitingFor = readable(strings.Join(waiting, "; "))
	if sealed := volumes.WithoutRecovery(s.opts.Store); len(sealed) > 0 {
		res.Notices = append(res.Notices, strings.Join(lists.Of(sealed, func(o resource.Object[volumes.Status]) string { return o.ID }), " and ")+" can't be opened in another machine: make a recovery key with gbctl -n ADDRESS recovery-key add")
	}
	health := kubelet.Health(s.opts.Store)
	res.KubernetesServes, res.KubernetesLacks = health.Serves, readable(health.Faults.String())
	res.KubernetesFaulty = lists.Of(health.Faults, func(f kubelet.Fault) string { return f.Object })
	return connect.NewResponse(res), nil
}

// text is the content of a small file, "" where there is none.
func (s *nodeService) text(name string) string {
	f, err := os.Open(s.path(name))
	if err != nil {
		return ""
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, maxLastExit)) // none is there
	return strings.TrimSpace(string(data))
}

func number(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

func (s *nodeService) Time(context.Context, *connect.Request[apiv1.TimeRequest]) (*connect.Response[apiv1.TimeResponse], error) {
	res := &apiv1.TimeResponse{Now: timestamppb.Now()}
	o, err := clock.Statuses.Get(s.opts.Store, clock.StatusID)
	if err != nil {
		res.Message = `service "timed" hasn't looked at the clock yet`
		return connect.NewResponse(res), nil
	}
	res.Synced, res.Server, res.Message = o.Spec.Synced, o.Spec.Server, readable(o.Spec.Message)
	res.Offset, res.Error = durationpb.New(o.Spec.Offset), durationpb.New(o.Spec.MaxError)
	res.Server = cmp.Or(res.Server, string(o.Spec.Source))
	return connect.NewResponse(res), nil
}

func (s *nodeService) SetTime(ctx context.Context, req *connect.Request[apiv1.SetTimeRequest]) (*connect.Response[apiv1.SetTimeResponse], error) {
	if err := req.Msg.GetTime().CheckValid(); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	to := req.Msg.GetTime().AsTime()
	if err := s.opts.SetTime(ctx, to); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(&apiv1.SetTimeResponse{Message: "the clock is set to " + to.Format(time.RFC3339)}), nil
}

func (s *nodeService) Disks(context.Context, *connect.Request[apiv1.DisksRequest]) (*connect.Response[apiv1.DisksResponse], error) {
	found, err := s.opts.Disks()
	res := &apiv1.DisksResponse{}
	for _, disk := range found {
		res.Disks = append(res.Disks, &apiv1.Disk{
			Device: disk.Path, Size: uint64(disk.Size), Model: disk.Model, Serial: disk.Serial, Bus: disk.Bus,
			ReadOnly: disk.ReadOnly, System: disk.System, Content: disk.Holds,
			Wwid: disk.WWID, BusPath: disk.BusPath, Type: string(disk.Type),
		})
	}
	return connect.NewResponse(res), err
}

func (s *nodeService) BootChart(_ context.Context, req *connect.Request[apiv1.BootChartRequest]) (*connect.Response[apiv1.BootChartResponse], error) {
	chart := dag.NewChart(s.opts.Graph.BootEvents())
	var out bytes.Buffer
	draw := chart.Text
	if req.Msg.GetSvg() {
		draw = chart.SVG
	}
	err := draw(&out)
	return connect.NewResponse(&apiv1.BootChartResponse{Chart: out.Bytes()}), err
}

func (s *nodeService) Diagnose(ctx context.Context, _ *connect.Request[apiv1.DiagnoseRequest]) (*connect.Response[apiv1.DiagnoseResponse], error) {
	findings, checked := s.opts.Diagnose(ctx)
	if err := ctx.Err(); err != nil {
		return nil, connect.NewError(connect.CodeDeadlineExceeded, err)
	}
	return connect.NewResponse(&apiv1.DiagnoseResponse{Findings: findings, Checked: checked}), nil
}

// asked is the reason why the node ends, for its console and its next boot.
func asked(ctx context.Context) string {
	caller := callOf(ctx)
	return fmt.Sprintf("%s over the machine API, from %s", caller, caller.remote)
}

// withKey calls do with the passphrase of a request.
func withKey(ctx context.Context, text []byte, do func(ctx context.Context, key string) error) error {
	key, err := contract.ParseRecoveryKey(string(text))
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	return cannot(do(ctx, key))
}

// cannot is the error of a machine that can't do it now.
func cannot(err error) error {
	if err == nil {
		return nil
	}
	return connect.NewError(connect.CodeFailedPrecondition, err)
}

func (s *nodeService) AddRecoveryKey(ctx context.Context, req *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), withKey(ctx, req.Msg.GetKey(), s.opts.Recovery.AddRecoveryKey)
}

func (s *nodeService) ListRecoveryKeys(ctx context.Context, _ *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	all, err := s.opts.Recovery.RecoveryKeys(ctx)
	res := &apiv1.RecoveryKeyResponse{}
	for _, k := range all {
		v := &apiv1.VolumeRecoveryKey{Volume: k.Label}
		for _, slot := range k.Slots {
			v.Slots, v.Added = append(v.Slots, uint32(slot)), timestamppb.New(k.Added)
		}
		res.Volumes = append(res.Volumes, v)
	}
	return connect.NewResponse(res), cannot(err)
}

func (s *nodeService) RemoveRecoveryKey(ctx context.Context, _ *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), cannot(s.opts.Recovery.RemoveRecoveryKey(ctx))
}

func (s *nodeService) Unlock(ctx context.Context, req *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), withKey(ctx, req.Msg.GetKey(), s.opts.Recovery.Unlock)
}

// Nonces of Attest are as long as hashes are, more or less.
const minNonce, maxNonce = 16, 64

func (s *nodeService) Attest(_ context.Context, req *connect.Request[apiv1.AttestRequest]) (*connect.Response[apiv1.AttestResponse], error) {
	if n := len(req.Msg.GetNonce()); n < minNonce || n > maxNonce {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("a nonce has %d to %d bytes, and this one %d", minNonce, maxNonce, n))
	}
	q, system, err := s.opts.Recovery.Quote(req.Msg.GetNonce())
	res := &apiv1.AttestResponse{Quoted: q.Quoted, Signature: q.Signature, Key: q.Key, System: system, Signatures: q.Signatures, Pcrs: map[uint32][]byte{}}
	for pcr, value := range q.PCRs {
		res.Pcrs[uint32(pcr)] = value
	}
	return connect.NewResponse(res), cannot(err)
}
