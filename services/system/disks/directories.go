package disks

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
)

type directory struct {
	path string
	mode fs.FileMode
	why  string
}

// directories under /var that exist before any program needs them.
var directories = []directory{
	{"lib", 0o755, ""},
	{"lib/etcd", 0o700, "etcd refuses a data directory that others can read"},
	{"lib/containerd", 0o711, "images and containers; users in containers pass through"},
	{"lib/kubelet", 0o750, "pods, with their secrets"},
	{"lib/cni", 0o700, "addresses that were given to pods"},
	{"lib/docker/containers", 0o755, "where older log shippers look first"},
	{"opt", 0o755, ""},
	{"opt/cni/bin", 0o755, "plugins that pod networks install, see openPlugins"},
	{"log", 0o755, "the system's own logs"},
	{"log/audit", 0o700, ""},
	{"log/audit/kube", 0o700, "audit log of the API server"},
	{"log/pods", 0o755, "logs of containers, where Kubernetes' log shippers look"},
	{"log/containers", 0o755, "links to them"},
	{"cri", 0o755, ""},
	{"cri/conf.d", 0o755, "containerd settings of the user"},
	{"tmp", 0o777 | fs.ModeSticky, "temporary files that outlive a reboot"},
}

func makeDirectories(at string) error {
	all := slices.Clone(directories)
	for _, p := range boot.HostPaths {
		if below, ok := strings.CutPrefix(p.At, boot.EphemeralDir+"/"); ok {
			all = append(all, directory{below, 0o755, "of " + p.Path})
		}
	}
	for _, dir := range all {
		path := filepath.Join(at, dir.path)
		// The mode is exact, whatever the umask is, also for those of an earlier release.
		if err := errors.Join(untrusted.Reclaim(path, dir.mode.Perm()), untrusted.Chmod(path, dir.mode)); err != nil {
			return fmt.Errorf("make the directories of EPHEMERAL: %w", err)
		}
	}
	return makeRun(at)
}

// makeRun empties /var/run, which programs know for /run, and links to what agents look for. All of it isn't one
// link: earlier releases, to which a node can go back, want a directory. containerd reads descriptions of devices
// there (cdi).
func makeRun(at string) error {
	run := filepath.Join(at, "run")
	err := errors.Join(untrusted.RemoveAll(run), untrusted.MkdirAll(run, 0o755), untrusted.Chmod(run, 0o755))
	for _, name := range []string{"cdi", "containerd", "udev"} {
		err = errors.Join(err, untrusted.Symlink("/run/"+name, filepath.Join(run, name)))
	}
	return err
}

const (
	machineIDFile = "/etc/machine-id"
	machineIDLen  = 32 // hexadecimal digits (machine-id(5))
)

// nameMachine gives the node its machine ID: it is made once, kept on STATE,
// and written where programs look for it. The kubelet identifies nodes by it.
func nameMachine(stateDir, idFile string) error {
	kept := filepath.Join(stateDir, "machine-id")
	text, err := os.ReadFile(kept)
	if boot.IgnoreMissing(err) != nil {
		return fmt.Errorf("read the machine ID: %w", err)
	}
	id := strings.TrimSpace(string(text))
	if raw, err := hex.DecodeString(id); err != nil || len(raw) != machineIDLen/2 {
		var random [machineIDLen / 2]byte
		_, _ = rand.Read(random[:]) // never fails (crypto/rand)
		id = hex.EncodeToString(random[:])
		if err := boot.WriteFile(kept, []byte(id+"\n"), 0o444); err != nil {
			return err
		}
	}
	return boot.WriteFile(idFile, []byte(id+"\n"), 0o444)
}
