package rootfs

import (
	"io/fs"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// directories are what a node mounts on or writes to; all others come into being with the files in them.
var directories = []Entry{
	dir("/dev", 0o755), // devtmpfs
	dir("/etc", 0o755), // overlay over this one, rebuilt from the configuration at each boot
	dir("/etc/cni", 0o755),
	dir("/etc/cni/net.d", 0o700), // configuration of the CNI plugins
	dir("/etc/kubernetes", 0o755),
	dir("/etc/kubernetes/manifests", 0o700),     // static pods
	dir("/etc/kubernetes/volumeplugins", 0o755), // where the kubelet looks for volume plugins
	dir("/proc", 0o555),
	dir("/run", 0o755), // tmpfs
	dir("/sys", 0o555),
	dir("/system", 0o755),
	dir("/system/boot", 0o700),       // the EFI system partition, while it is written
	dir("/system/run", 0o755),        // tmpfs: of PID 1 and its sandboxes
	dir("/system/secrets", 0o700),    // tmpfs: keys and certificates
	dir("/system/state", 0o700),      // STATE
	dir("/tmp", 0o777|fs.ModeSticky), // tmpfs
	dir(boot.CNIPlugins, 0o755),
	dir("/usr/lib/modules", 0o755),
	dir("/usr/lib64", 0o755), // the dynamic linker, for the tools that have one
	dir("/var", 0o755),       // EPHEMERAL
}

// links keep the names that programs and manifests have built in.
var links = []Entry{
	link("/bin", "usr/bin"),
	link("/sbin", "usr/sbin"),
	link("/lib", "usr/lib"),
	link("/lib64", "usr/lib64"),
	link("/etc/mtab", "/proc/self/mounts"),
	link("/etc/ssl/cert.pem", "certs/ca-certificates"), // where LibreSSL and Go look
	link("/etc/ssl/certs/ca-certificates.crt", "ca-certificates"),
	link("/etc/os-release", "../usr/lib/os-release"),
}

// initPlace is where PID 1 is bound: an empty file.
var initPlace = Entry{Path: "/usr/sbin/init", Mode: 0o755}

// accounts and the rest of what a C library or Go's resolver asks for. Nobody logs in: the accounts give names to numbers.
var accounts = []Entry{
	text("/etc/passwd", lines(
		"root:x:0:0:root:/:/nonexistent",
		"apid:x:50:50:machine API:/nonexistent:/nonexistent",
		"trustd:x:51:51:certificate signer:/nonexistent:/nonexistent",
		"installer:x:52:52:program of another system:/nonexistent:/nonexistent",
		"etcd:x:60:60:etcd:/nonexistent:/nonexistent",
		"kube-apiserver:x:61:61:API server:/nonexistent:/nonexistent",
		"kube-controller-manager:x:62:62:controller manager:/nonexistent:/nonexistent",
		"kube-scheduler:x:63:63:scheduler:/nonexistent:/nonexistent",
		"nobody:x:65534:65534:nobody:/nonexistent:/nonexistent",
	)),
	text("/etc/group", lines(
		"root:x:0:",
		"apid:x:50:",
		"trustd:x:51:",
		"installer:x:52:",
		"etcd:x:60:",
		"kube-apiserver:x:61:",
		"kube-controller-manager:x:62:",
		"kube-scheduler:x:63:",
		"nogroup:x:65534:",
	)),
	text("/etc/nsswitch.conf", lines(
		"passwd: files",
		"group: files",
		"hosts: files dns",
		"networks: files",
		"protocols: files",
		"services: files",
	)),
	text("/etc/hosts", lines(
		"127.0.0.1 localhost",
		"::1 localhost ip6-localhost ip6-loopback",
	)),
	// Names that nft and the CNI plugins look up (IANA's assigned internet protocol numbers).
	text("/etc/protocols", lines(
		"ip 0 IP",
		"icmp 1 ICMP",
		"igmp 2 IGMP",
		"tcp 6 TCP",
		"udp 17 UDP",
		"dccp 33 DCCP",
		"gre 47 GRE",
		"esp 50 IPSEC-ESP",
		"ah 51 IPSEC-AH",
		"ipv6-icmp 58 IPv6-ICMP",
		"sctp 132 SCTP",
		"udplite 136 UDPLite",
	)),
	// Pods that mount these get UTC, which a node has: the smallest file of tzfile(5).
	text("/etc/timezone", "Etc/UTC\n"),
	text("/etc/localtime", utc+utc+"\nUTC0\n"),
	// Empty means: not yet known. PID 1 writes the node's own over it.
	text("/etc/machine-id", ""),
	text("/etc/resolv.conf", ""),
}

// utc is a block of tzfile(5) with one kind of time, of four letters with the zero at the end.
var utc = "TZif2" + strings.Repeat("\x00", 34) + "\x01\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00UTC\x00"

// osRelease is what Kubernetes shows as a node's OS image. (S-307)
func osRelease(version string) Entry {
	return text("/usr/lib/os-release", lines(
		`NAME="Garboard"`,
		`ID=garboard`,
		`VERSION_ID="`+strings.TrimPrefix(version, "v")+`"`,
		`PRETTY_NAME="Garboard (`+version+`)"`,
	))
}

func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }
