package architecture

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// opens are the calls that reach a file by its path and would follow a link or wait for a FIFO.
var opens = regexp.MustCompile(`\b(os\.(Open|OpenFile|OpenRoot|OpenInRoot|DirFS|ReadFile|ReadDir|Stat|Lstat|Readlink|Create|CreateTemp|WriteFile|` +
	`Mkdir|MkdirAll|MkdirTemp|Remove|RemoveAll|Rename|Chmod|Chown|Lchown|Truncate|Symlink|Link|Chtimes|CopyFS)|` +
	`filepath\.(Walk|WalkDir|Glob|EvalSymlinks)|(unix|syscall)\.(Open|Openat|Stat|Lstat|Statfs|Unlink|Rename|Mknod|Mkfifo|Chmod|Chown|Mkdir|Rmdir)|` +
	`tls\.LoadX509KeyPair|ioutil\.\w+|boot\.(WriteFile|SyncDir))\(`)

// own are the folders and files of PID 1 that may use these calls, with what their paths are. A
// path that a pod with a hostPath below /var, a volume or a directory of pods could have prepared
// isn't PID 1's own: boot/untrusted opens it.
var own = map[string]string{
	"init":                                           "initramfs, /proc, /sys, /dev, STATE",
	"boot/esp":                                       "EFI system partition, efivarfs",
	"boot/meta":                                      "/sys, the META partition",
	"boot/sources.go":                                "seed of a container, media",
	"boot/untrusted":                                 "is the one way",
	"boot/write.go":                                  "its callers are here",
	"boot/mounted_unix.go":                           "IsMountPoint, for the directory of STATE and that of the pinned address",
	"services/core/dag":                              "stat only: what a service waits for",
	"services/core/logs/console.go":                  "/dev/console",
	"services/core/logs/crash.go":                    "/sys/fs/pstore",
	"services/core/logs/kernel.go":                   "/dev/kmsg",
	"services/core/operation":                        "STATE",
	"services/core/process":                          "/proc",
	"services/front/api/file.go":                     "a person has named it",
	"services/front/api/file_copy.go":                "a person has named it",
	"services/front/api/file_open.go":                "a person has named it; looked at before and after it is opened, without waiting",
	"services/front/api/metrics.go":                  "statfs of the mounts",
	"services/front/api/node.go":                     "/proc, statfs of the mounts",
	"services/front/api/node_proc.go":                "/proc, /sys, statfs of the mounts",
	"services/front/console":                         "/dev, /sys",
	"services/front/sandbox":                         "/run/garboard, /sys/fs/cgroup; its program isn't PID 1",
	"services/front/statefile":                       "/run/garboard",
	"services/kubernetes/balancer/apiservers.go":     "STATE",
	"services/kubernetes/containerd/config.go":       "/etc/containerd, written just before",
	"services/kubernetes/containerd/containerd.go":   "/etc/containerd, /run/containerd",
	"services/kubernetes/containerd/imageservice.go": "/run/garboard",
	"services/kubernetes/containerd/installer.go":    "a read-only view of an image",
	"services/kubernetes/containerd/pull.go":         "statfs of /var",
	"services/kubernetes/containerd/registries.go":   "/etc/containerd",
	"services/kubernetes/containerd/runner.go":       "/run/garboard, /proc",
	"services/kubernetes/controlplane/kubelet.go":    "STATE: the mark of a self-hosted control plane",
	"services/kubernetes/etcd/journal.go":            "STATE",
	"services/kubernetes/etcd/recover.go":            "statfs",
	"services/kubernetes/extension/extension.go":     "the root file system, /etc/machine-id",
	"services/kubernetes/controlplane/label.go":      "/etc/machine-id",
	"services/kubernetes/kubelet/config.go":          "/proc/sys",
	"services/kubernetes/kubelet/join.go":            "/etc/machine-id",
	"services/kubernetes/kubelet/staticpods.go":      "STATE: the mark of a self-hosted control plane",
	"services/kubernetes/secrets":                    "/system/secrets, STATE",
	"services/operations/doctor/collect_files.go":    "/proc, statfs of the mounts",
	"services/report.go":                             "a device that the command line names",
	"services/system/clock":                          "STATE, /dev",
	"services/system/disks":                          "/sys, /dev, STATE, mount points; what is below /var goes through boot/untrusted",
	"services/system/files/image.go":                 "the root file system, below its mounts",
	"services/system/files/plan.go":                  "looks only where links lead; the writer follows none",
	"services/system/install":                        "EFI system partition, in the installer",
	"services/system/machine":                        "STATE",
	"services/system/network/advertisements.go":      "/proc/sys, /sys",
	"services/system/network/cards.go":               "/sys",
	"services/system/network/nodeip.go":              "STATE",
	"services/system/network/owner.go":               "/sys",
	"services/system/network/outbound.go":            "/etc/ssl of the root file system",
	"services/system/slots":                          "EFI system partition, efivarfs, the root file system",
	"services/system/sysctl":                         "/proc/sys, /sys",
	"services/system/udev":                           "/sys, /dev, /lib/modules",
}

// A call that opens a file by its path is either on a path of PID 1's own, or somebody decides.
func TestFilesOfOthersAreOpenedInOneWay(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	for _, room := range []string{"init", "boot", "services"} {
		err := filepath.WalkDir(filepath.Join("../..", room), func(file string, entry fs.DirEntry, err error) error {
			name := filepath.ToSlash(strings.TrimPrefix(file, filepath.Join("../..")+"/"))
			switch {
			case err != nil:
				return err
			case entry.IsDir() && entry.Name() == "testdata":
				return fs.SkipDir
			case entry.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
				return nil
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			call := ""
			for line := range strings.Lines(string(text)) {
				if code, _, _ := strings.Cut(line, "//"); call == "" {
					call = opens.FindString(code)
				}
			}
			if call == "" {
				return nil
			}
			for at := name; at != "."; at = filepath.Dir(at) {
				if own[at] != "" {
					used[at] = true
					return nil
				}
			}
			t.Errorf("%s calls %s): a pod may have put a link, a FIFO or a device there; use boot/untrusted, or say here why the path is PID 1's own", name, call)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range own {
		if !used[name] {
			t.Errorf("%s has no such call any more: remove it here", name)
		}
	}
}
