package disks

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/machine"
)

// directories under /var that are there before anything wants them.
var directories = []struct {
	path string
	mode fs.FileMode
	why  string
}{
	{"lib", 0o755, ""},
	{"lib/etcd", 0o700, "etcd refuses a data directory that others can read"},
	{"lib/containerd", 0o711, "images and containers; users in containers pass through"},
	{"lib/kubelet", 0o750, "pods, with their secrets"},
	{"lib/cni", 0o700, "addresses that were given to pods"},
	{"log", 0o755, "the system's own logs"},
	{"log/pods", 0o755, "logs of containers, where Kubernetes' log shippers look"},
	{"log/containers", 0o755, "links to them"},
	{"cri", 0o755, ""},
	{"cri/conf.d", 0o755, "containerd settings of the user"},
	{"run", 0o755, "programs in images that know /run by its old name"},
	{"tmp", 0o777 | fs.ModeSticky, "temporary files that outlive a reboot"},
}

func (d *Disks) makeDirectories() error {
	for _, dir := range directories {
		path := filepath.Join(d.o.varDir, dir.path)
		if err := os.MkdirAll(path, dir.mode.Perm()); err != nil {
			return fmt.Errorf("make the directories of EPHEMERAL: %w", err)
		}
		// Exact, whatever the umask, also for those of an earlier release.
		if err := os.Chmod(path, dir.mode); err != nil {
			return fmt.Errorf("make the directories of EPHEMERAL: %w", err)
		}
	}
	return nil
}

// lateConfig is the configuration to go on with when STATE came only after
// machined had found one elsewhere: a slow disk. The one on STATE is the node's
// own, with all changes since it was installed, so it replaces the other.
func (d *Disks) lateConfig(running *config.Config) (*config.Config, error) {
	data, err := os.ReadFile(d.configFile())
	if errors.Is(err, fs.ErrNotExist) {
		return running, nil // STATE is new
	}
	if err != nil {
		return nil, err
	}
	kept, _, err := config.Load("STATE", data)
	if err != nil {
		return nil, fmt.Errorf("STATE came late, and its configuration is broken: %w", err)
	}
	text, err := running.Encode()
	if err != nil {
		return nil, err
	}
	if old, err := kept.Encode(); err != nil || bytes.Equal(old, text) {
		return running, err
	}
	d.log.Warn("STATE came late: its configuration replaces the one that this boot began with")
	return kept, machine.Configs.Put(d.o.Store.As(machine.ID), machine.ConfigID, kept)
}

func (d *Disks) configFile() string {
	return filepath.Join(d.o.stateDir, filepath.Base(boot.ConfigFile))
}

// persist keeps the configuration on STATE (acceptance S-021), or takes it away
// where it isn't to be kept.
func (d *Disks) persist(cfg *config.Config) error {
	file := d.configFile()
	if cfg.Persist != nil && !*cfg.Persist {
		return nil
	}
	data, err := cfg.Encode()
	if err != nil {
		return fmt.Errorf("keep the configuration on STATE: %w", err)
	}
	old, err := os.ReadFile(file)
	if err == nil && string(old) == string(data) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("keep the configuration on STATE: %w", err)
	}
	// It holds the keys of the cluster: nobody but root reads it.
	if err := boot.WriteFile(file, data, 0o600); err != nil {
		return fmt.Errorf("keep the configuration on STATE: %w", err)
	}
	return nil
}
