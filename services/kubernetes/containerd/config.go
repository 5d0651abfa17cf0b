package containerd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/pelletier/go-toml/v2"
)

const (
	configFile = "/etc/containerd/config.toml"
	hostsDir   = "/etc/containerd/certs.d" // hosts.toml per registry: containerd docs/hosts.md
	stateDir   = "/run/containerd"
	// dropInsDir has those drop-ins of /var/cri/conf.d that the configuration lays there.
	dropInsDir = "/etc/containerd/conf.d"

	// oomScoreAdj is also the kubelet's default: the kernel ends all pods before these two.
	oomScoreAdj = -999
)

// table is a TOML table; containerd's plugin options are free-form, so its
// configuration is too.
type table = map[string]any

// syncLayers is false in a container: its file system is the host's, which it would make sync all that the host has in memory.
func syncLayers(mode boot.Mode) bool { return mode == boot.Machine }

// renderConfig is containerd's own configuration (version 3, containerd 2.x).
// The user's drop-ins are merged over it by containerd (acceptance S-143), out of dropInsDir. It may hold passwords of registries.
func renderConfig(mode boot.Mode, r config.Registries) ([]byte, error) {
	runtime := table{
		"containerd": table{
			"default_runtime_name": "runc",
			"runtimes": table{"runc": table{
				"runtime_type": "io.containerd.runc.v2",
				// cgroupfs, as the kubelet: there is no systemd on a node.
				"options": table{"SystemdCgroup": false, "BinaryName": "/usr/bin/runc"},
			}},
		},
		"cni": table{"bin_dirs": []string{boot.CNIBinDir}, "conf_dir": boot.CNIConfDir},
		// A container node may lack CAP_SYS_RESOURCE, without which a lower OOM
		// score than one's own can't be set and every pod would fail.
		"restrict_oom_score_adj": mode == boot.Container,
		// How often containerd asks the shim of each container for its processor time. With the
		// default of a second, this takes a fifth of what an idle control plane needs. The
		// kubelet reads it each 10 s.
		"stats_collect_period": "10s",
	}
	images := table{
		"pinned_images": table{"sandbox": config.DefaultPauseImage},
		"registry":      table{"config_path": hostsDir, "configs": logins(r)},
		// With this, the CRI pulls by itself, and unpacks through the service below: that of its transfer service doesn't sync.
		"image_pull_with_sync_fs": syncLayers(mode),
	}
	return toml.Marshal(table{
		"version": 3,
		// Its shims get one more. A container may lack CAP_SYS_RESOURCE: containerd logs that
		// and goes on.
		"oom_score": oomScoreAdj,
		"root":      boot.ContainerdDir,
		"state":     stateDir,
		"imports":   []string{filepath.Join(dropInsDir, "*.toml")},
		"grpc":      table{"address": Socket},
		"disabled_plugins": []string{
			"io.containerd.snapshotter.v1.blockfile",
			"io.containerd.snapshotter.v1.native",
			"io.containerd.snapshotter.v1.erofs",
			"io.containerd.tracing.processor.v1.otlp",
			"io.containerd.internal.v1.tracing",
			"io.containerd.nri.v1.nri",
		},
		"plugins": table{
			"io.containerd.cri.v1.runtime": runtime,
			"io.containerd.cri.v1.images":  images,
			// Each layer is durable before containerd notes that it is there, whoever unpacks it: otherwise a power cut within the kernel's write-back time
			// (half a minute) leaves an image that counts as unpacked and has empty files.
			"io.containerd.service.v1.diff-service": table{"sync_fs": syncLayers(mode)},
		},
	})
}

// writeDropIns writes to dir what machine.files lays in /var/cri/conf.d, out of the configuration:
// a file that something else has put there, or has changed, would run programs as root.
func writeDropIns(dir string, entries []config.File) error {
	if err := untrusted.RemoveAll(dir); err != nil {
		return err
	}
	if err := untrusted.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	content := map[string]string{}
	for _, e := range entries {
		path := filepath.Clean(e.Path)
		if filepath.Dir(path) != boot.CRIConfDir {
			continue
		}
		text := content[path]
		switch {
		case text == "":
			text = e.Content
		case e.Op == config.FileAppend: // as package files adds it
			text = strings.TrimSuffix(text, "\n") + "\n" + e.Content
		}
		content[path] = text
	}
	for path, text := range content {
		if err := untrusted.WriteFile(filepath.Join(dir, filepath.Base(path)), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// checkDropIns says which of the user's files containerd would end on: it says so
// only in its log.
func checkDropIns(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "*.toml"))
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		var wrong *toml.DecodeError
		if err := toml.Unmarshal(data, &table{}); errors.As(err, &wrong) {
			line, column := wrong.Position()
			return fmt.Errorf("%s:%d:%d: %w; correct it in machine.files, or take it out", name, line, column, err)
		} else if err != nil {
			return fmt.Errorf("%s: %w; correct it in machine.files, or take it out", name, err)
		}
	}
	return nil
}
