package api

import (
	"context"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/moby/sys/mountinfo"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// maxArgs bounds a command line in an answer: some are a hundred kilobytes.
	maxArgs = 4 << 10
	// statfsPatience is for a mount whose server doesn't answer: statfs(2) blocks then.
	statfsPatience = 500 * time.Millisecond
)

// podGroup is in the paths of the cgroups of pods, and in no other.
const podGroup = "/kubepods"

func (s *nodeService) Processes(context.Context, *connect.Request[apiv1.ProcessesRequest]) (*connect.Response[apiv1.ProcessesResponse], error) {
	fs, err := s.proc()
	if err != nil {
		return nil, err
	}
	all, err := fs.AllProcs()
	if err != nil {
		return nil, err
	}
	res := &apiv1.ProcessesResponse{}
	for _, p := range all {
		stat, err := p.Stat()
		if err != nil {
			continue // gone meanwhile
		}
		// Kernel threads have neither. The kubelet puts values of Secrets into the arguments of pods' programs.
		var args []string
		groups, err := p.Cgroups()
		if err == nil && !slices.ContainsFunc(groups, func(g procfs.Cgroup) bool { return strings.Contains(g.Path, podGroup) }) {
			args, _ = p.CmdLine()
		}
		executable, _ := p.Executable()
		res.Processes = append(res.Processes, &apiv1.Process{
			Pid: int32(stat.PID), Ppid: int32(stat.PPID), State: stat.State, Threads: uint32(stat.NumThreads),
			CpuTime:       durationpb.New(time.Duration(stat.CPUTime() * float64(time.Second))),
			VirtualMemory: uint64(stat.VirtualMemory()), ResidentMemory: uint64(stat.ResidentMemory()),
			Command: readable(stat.Comm), Executable: readable(executable), Args: config.RedactText(readable(config.Shorten(strings.Join(args, " "), maxArgs))),
		})
	}
	slices.SortFunc(res.Processes, func(a, b *apiv1.Process) int { return int(a.GetPid() - b.GetPid()) })
	return connect.NewResponse(res), nil
}

func (s *nodeService) Memory(context.Context, *connect.Request[apiv1.MemoryRequest]) (*connect.Response[apiv1.MemoryResponse], error) {
	data, err := os.ReadFile(s.path("proc/meminfo"))
	if err != nil {
		return nil, err
	}
	res := &apiv1.MemoryResponse{Meminfo: map[string]uint64{}}
	for line := range strings.Lines(string(data)) {
		name, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		n, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil {
			continue
		}
		if len(fields) > 1 { // kB, which is KiB; HugePages are counted without
			n <<= 10
		}
		res.Meminfo[name] = n
	}
	fs, err := s.proc()
	if err != nil {
		return nil, err
	}
	if self, err := fs.Self(); err == nil {
		if rollup, err := self.ProcSMapsRollup(); err == nil {
			res.Pid1Pss = rollup.Pss
		}
	}
	return connect.NewResponse(res), nil
}

func (s *nodeService) Mounts(ctx context.Context, _ *connect.Request[apiv1.MountsRequest]) (*connect.Response[apiv1.MountsResponse], error) {
	f, err := os.Open(s.path("proc/self/mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, nil)
	if err != nil {
		return nil, err
	}
	res := &apiv1.MountsResponse{}
	for _, m := range mounts {
		mount := &apiv1.Mount{Source: readable(m.Source), Target: readable(m.Mountpoint), Type: m.FSType, Options: readable(m.Options)}
		if st, ok := s.space(ctx, m.Mountpoint); ok {
			mount.Size, mount.Available = st.Blocks*uint64(st.Bsize), st.Bavail*uint64(st.Bsize)
		}
		res.Mounts = append(res.Mounts, mount)
	}
	return connect.NewResponse(res), nil
}

// space gets the free space of a file system within statfsPatience. While a request
// blocks, there is no second one.
func (s *nodeService) space(ctx context.Context, path string) (st unix.Statfs_t, ok bool) {
	if _, hangs := s.hanging.LoadOrStore(path, true); hangs {
		return st, false
	}
	answer := make(chan unix.Statfs_t, 1)
	go func() {
		defer s.hanging.Delete(path)
		var st unix.Statfs_t
		if unix.Statfs(path, &st) == nil {
			answer <- st
		}
		close(answer)
	}()
	select {
	case st, ok = <-answer:
	case <-time.After(statfsPatience):
	case <-ctx.Done():
	}
	return st, ok
}

// tcpStates by the kernel's numbers (include/net/tcp_states.h).
var tcpStates = []string{
	"", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV",
}

const tcpListen = "LISTEN"

func (s *nodeService) Netstat(_ context.Context, req *connect.Request[apiv1.NetstatRequest]) (*connect.Response[apiv1.NetstatResponse], error) {
	fs, err := s.proc()
	if err != nil {
		return nil, err
	}
	owners := socketOwners(fs)
	res := &apiv1.NetstatResponse{}
	// Deprecated because netlink is faster with thousands of sockets; but that
	// takes modules (sock_diag) which a kernel may be without.
	//lint:ignore SA1019 see above
	tcp, _ := fs.NetTCP()
	//lint:ignore SA1019 see above
	tcp6, _ := fs.NetTCP6() // a kernel may be without IPv6
	udp, _ := fs.NetUDP()
	udp6, _ := fs.NetUDP6()
	for _, table := range []struct {
		name   string
		lines  procfs.NetTCP
		states []string
	}{{"tcp", tcp, tcpStates}, {"tcp6", tcp6, tcpStates}, {"udp", procfs.NetTCP(udp), nil}, {"udp6", procfs.NetTCP(udp6), nil}} {
		for _, l := range table.lines {
			state := ""
			if l.St < uint64(len(table.states)) {
				state = table.states[l.St]
			} else if table.states != nil {
				state = strconv.FormatUint(l.St, 10)
			}
			if req.Msg.GetListeningOnly() && state != tcpListen && (state != "" || l.RemPort != 0) {
				continue
			}
			owner := owners[l.Inode]
			res.Sockets = append(res.Sockets, &apiv1.Socket{
				Protocol: table.name, State: state, Local: endpoint(l.LocalAddr, l.LocalPort), Remote: endpoint(l.RemAddr, l.RemPort),
				ReceiveQueue: l.RxQueue, SendQueue: l.TxQueue, Uid: uint32(l.UID), Pid: owner.pid, Command: owner.command,
			})
		}
	}
	return connect.NewResponse(res), nil
}

func endpoint(ip net.IP, port uint64) string {
	if port == 0 {
		return net.JoinHostPort(ip.String(), "*")
	}
	return net.JoinHostPort(ip.String(), strconv.FormatUint(port, 10))
}

type socketOwner struct {
	pid     int32
	command string
}

// socketOwners finds the process behind each socket by its inode, as far as the
// processes are still there.
func socketOwners(fs procfs.FS) map[uint64]socketOwner {
	owners := map[uint64]socketOwner{}
	all, _ := fs.AllProcs()
	for _, p := range all {
		targets, _ := p.FileDescriptorTargets() // none: gone meanwhile
		command, _ := p.Comm()
		for _, target := range targets {
			text, ok := strings.CutPrefix(target, "socket:[")
			if inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64); ok && err == nil {
				owners[inode] = socketOwner{int32(p.PID), readable(command)}
			}
		}
	}
	return owners
}
