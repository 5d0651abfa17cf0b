package rootfs

import (
	"embed"
	"errors"
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

// etc has the accounts and the rest of what a C library or Go's resolver asks for. Nobody logs in: the accounts give
// names to numbers. The protocols are those that nft and the CNI plugins look up (IANA's assigned internet protocol
// numbers). machine-id and resolv.conf are empty, which means: not yet known. PID 1 writes the node's own over them.
//
//go:embed etc
var etc embed.FS

// configured are the files of etc, and the local time: pods that mount it get UTC, which a node has, as the smallest
// file of tzfile(5).
func configured() ([]Entry, error) {
	entries := []Entry{text("/etc/localtime", utc+utc+"\nUTC0\n")}
	files, err := etc.ReadDir("etc")
	for _, f := range files {
		content, failed := etc.ReadFile("etc/" + f.Name())
		entries, err = append(entries, text("/etc/"+f.Name(), string(content))), errors.Join(err, failed)
	}
	return entries, err
}

// utc is a block of tzfile(5) with one kind of time, of four letters with the zero at the end.
var utc = "TZif2" + strings.Repeat("\x00", 34) + "\x01\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00UTC\x00"

// osRelease is what Kubernetes shows as a node's OS image.
func osRelease(version string) Entry {
	return text("/usr/lib/os-release", lines(
		`NAME="Garboard"`,
		`ID=garboard`,
		`VERSION_ID="`+strings.TrimPrefix(version, "v")+`"`,
		`PRETTY_NAME="Garboard (`+version+`)"`,
	))
}

func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }
