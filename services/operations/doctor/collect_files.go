package doctor

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
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
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), staticPodPrefix) {
			f.staticPodFiles = append(f.staticPodFiles, e.Name())
		}
	}
	f.etcdData, f.etcdSeen = hasEntries(d.path(boot.EtcdDataDir))
	if data, err := untrusted.ReadLinked(d.path(clientFile), maxSmall); err == nil {
		f.client = firstCertificate(data)
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
	for _, program := range controlPlanePrograms {
		f.pods[program] = lastLines(d.path(boot.LogDir, "pods"), program)
	}
	return func(s *snapshot) {
		s.files = f
		if f.client != nil {
			s.certificates = append(slices.Clone(s.certificates), certificate{"the kubelet as a client of the API server", f.client, true})
		}
	}
}

// hasEntries reports whether a directory holds anything, and whether that is known: one
// that isn't there holds nothing.
func hasEntries(dir string) (has, known bool) {
	entries, err := untrusted.ReadDir(dir)
	return len(entries) > 0, boot.IgnoreMissing(err) == nil
}

// readSmall reads a file of the kernel.
func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxSmall))
}

// firstCertificate skips what else is in a PEM file.
func firstCertificate(data []byte) *x509.Certificate {
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			return nil
		}
		if block.Type == "CERTIFICATE" {
			cert, _ := x509.ParseCertificate(block.Bytes)
			return cert
		}
		data = rest
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

// route is whether there is a way to other networks.
type route struct{ seen, v4, v6 bool }

// collectRoutes reads the kernel's routing tables (proc_net(5)).
func (d *Doctor) collectRoutes(context.Context, *snapshot) func(*snapshot) {
	v4, err := readSmall(d.path("/proc/net/route"))
	if err != nil {
		return nil
	}
	v6, _ := readSmall(d.path("/proc/net/ipv6_route")) // missing without IPv6
	r := route{seen: true, v4: defaultRoute4(v4), v6: defaultRoute6(v6)}
	return func(s *snapshot) { s.route = r }
}

const routeUp = 0x1 // RTF_UP in linux/route.h

// defaultRoute4 looks for a line "eth0 00000000 gateway flags … mask".
func defaultRoute4(table []byte) bool {
	for scan := bufio.NewScanner(bytes.NewReader(table)); scan.Scan(); {
		f := strings.Fields(scan.Text())
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		if flags, err := strconv.ParseUint(f[3], 16, 32); err == nil && flags&routeUp != 0 {
			return true
		}
	}
	return false
}

// defaultRoute6 looks for ::/0 on a link other than lo, where the kernel's own
// unreachable route is.
func defaultRoute6(table []byte) bool {
	any6 := hex.EncodeToString(make([]byte, 16))
	for scan := bufio.NewScanner(bytes.NewReader(table)); scan.Scan(); {
		if f := strings.Fields(scan.Text()); len(f) >= 10 && f[0] == any6 && f[1] == "00" && f[9] != "lo" {
			return true
		}
	}
	return false
}
