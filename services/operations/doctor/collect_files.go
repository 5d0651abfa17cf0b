package doctor

import (
	"context"
	"crypto/x509"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/prometheus/procfs"
)

const (
	// tailBytes of a container's log hold its last lines, and the stack of a panic.
	tailBytes = 32 << 10
	// maxSmall bounds files that are small on a healthy node.
	maxSmall = 1 << 20

	clientFile = boot.KubeletClient
)

// files is what was collected from the node's file systems.
type files struct {
	seen bool
	// staticPodFiles are the names of our static pods' files.
	staticPodFiles []string
	// etcdData: etcd has data; etcdSeen: its directory could be read.
	etcdData, etcdSeen bool
	// client is the kubelet's certificate; nil where it has none.
	client *x509.Certificate
	spaces []space
	// memory and available are in bytes; 0: unknown.
	memory, available uint64
	// pods are the last lines of the control plane's containers, by program.
	pods map[string][]string
}

// space is how full a file system is.
type space struct {
	label, path string
	size, free  uint64 // bytes
	nodes, left uint64 // inodes; 0: it has no limit
}

func (d *Doctor) collectFiles(context.Context, *snapshot) func(*snapshot) {
	f := files{seen: true, pods: map[string][]string{}}
	entries, _ := untrusted.ReadDir(d.path(boot.StaticPodsDir)) // none can be read
	f.staticPodFiles = lists.Some(entries, func(e fs.DirEntry) (string, bool) { return e.Name(), strings.HasPrefix(e.Name(), staticPodPrefix) })
	data, err := untrusted.ReadDir(d.path(boot.EtcdDataDir))
	f.etcdData, f.etcdSeen = len(data) > 0, boot.IgnoreMissing(err) == nil
	if data, err := untrusted.ReadLinked(d.path(clientFile), maxSmall); err == nil {
		f.client, _ = pki.ParseCert(data)
	}
	for _, v := range boot.Volumes {
		if v.Dir == "" {
			continue
		}
		if s, ok := d.o.statfs(d.path(v.Dir)); ok {
			s.label, s.path = v.Label, v.Dir
			f.spaces = append(f.spaces, s)
		}
	}
	f.memory, f.available = meminfo(d.path("/proc"))
	for _, program := range controlplane.Programs {
		f.pods[program] = lastLines(d.path(boot.LogDir, "pods"), program)
	}
	return func(s *snapshot) {
		s.files = f
		if f.client != nil {
			s.certificates = append(slices.Clone(s.certificates), certificate{"the kubelet as a client of the API server", f.client, true})
		}
	}
}

func statfs(path string) (space, bool) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Blocks == 0 {
		return space{}, false
	}
	return space{
		size: st.Blocks * uint64(st.Bsize), free: st.Bavail * uint64(st.Bsize), nodes: st.Files, left: st.Ffree,
	}, true
}

// meminfo reads two of the lines of proc_meminfo(5).
func meminfo(proc string) (total, available uint64) {
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return 0, 0
	}
	m, err := fs.Meminfo()
	if err != nil || m.MemTotalBytes == nil || m.MemAvailableBytes == nil {
		return 0, 0
	}
	return *m.MemTotalBytes, *m.MemAvailableBytes
}

// lastLines are those of the newest log of a static pod's container, as the kubelet
// lays them out: kube-system_NAME-NODE_UID/CONTAINER/RESTARTS.log. That of a container
// which has only just started is empty: the one before has why that ended.
func lastLines(dir, program string) []string {
	pods, _ := untrusted.Glob(dir, kubeSystem+"_"+program+"-*") // without them, nothing is shown
	newest, at := "", int64(0)
	for _, pod := range pods {
		logs, _ := untrusted.Glob(filepath.Join(pod, program), "*.log")
		for _, path := range logs {
			if info, err := untrusted.Stat(path); err == nil && info.Size() > 0 && info.ModTime().UnixNano() > at {
				newest, at = path, info.ModTime().UnixNano()
			}
		}
	}
	if newest == "" {
		return nil
	}
	return tailOf(newest)
}

func tailOf(path string) []string {
	f, err := untrusted.OpenLog(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, end-tailBytes), io.SeekStart)
	}
	data, _ := io.ReadAll(io.LimitReader(f, tailBytes)) // what came is still worth showing
	return strings.Split(strings.TrimRight(string(data), "\n"), "\n")
}

// wayless reports whether the kernel has no default route to other networks.
func wayless() bool {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		all, err := netlink.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_DST)
		// The kernel's own entry for "nowhere" isn't one.
		if err != nil || slices.ContainsFunc(all, func(r netlink.Route) bool { return r.Type == unix.RTN_UNICAST && r.Flags&unix.RTNH_F_LINKDOWN == 0 }) {
			return false
		}
	}
	return true
}

func (d *Doctor) collectRoutes(context.Context, *snapshot) func(*snapshot) {
	none := d.o.wayless()
	return func(s *snapshot) { s.wayless = none }
}
