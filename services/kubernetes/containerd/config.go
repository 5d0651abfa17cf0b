package containerd

import (
	"embed"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/render"
	"github.com/pelletier/go-toml/v2"
)

const (
	configFile = "/etc/containerd/config.toml"
	hostsDir   = "/etc/containerd/certs.d" // hosts.toml per registry: containerd docs/hosts.md
	// dropInsDir has those drop-ins of /var/cri/conf.d that the configuration lays there (*.toml).
	dropInsDir = "/etc/containerd/conf.d"

	// oomScoreAdj is also the kubelet's default: the kernel ends all pods before these two.
	oomScoreAdj = -999
)

// table is a TOML table; containerd's plugin options are free-form, so its
// configuration is too.
type table = map[string]any

//go:embed config.yaml
var configYAML embed.FS

var configFiles = render.Parse(configYAML, "config.yaml")

// renderConfig is containerd's own configuration.
// The user's drop-ins are merged over it by containerd: these files, and no others that are beside them. It may hold
// passwords of registries.
func renderConfig(mode boot.Mode, r config.Registries, dropIns []string) ([]byte, error) {
	var t table
	if err := configFiles.YAML("config.yaml", table{
		"OOMScore": oomScoreAdj, "Root": boot.ContainerdDir, "DropIns": append([]string{}, dropIns...), "Socket": Socket,
		"CNIBin": boot.CNIBinDir, "CNIConf": boot.CNIConfDir, "Container": mode == boot.Container,
		"Pause": config.DefaultPauseImage, "Hosts": hostsDir, "Logins": logins(r),
	}, &t); err != nil {
		return nil, err
	}
	return toml.Marshal(t)
}

// writeDropIns writes to dir what machine.files lays in /var/cri/conf.d, out of the configuration:
// a file that something else has put there, or has changed, would run programs as root. It returns those that
// containerd is to read.
func writeDropIns(dir string, entries []config.File) (imports []string, err error) {
	content := map[string]string{}
	for _, e := range entries {
		path := filepath.Clean(e.Path)
		if filepath.Dir(path) != boot.CRIConfDir || filepath.Ext(path) != ".toml" {
			continue
		}
		path = filepath.Join(dir, filepath.Base(path))
		if content[path] == "" {
			content[path] = e.Content
		} else if e.Op == config.FileAppend { // as package files adds it
			content[path] = strings.TrimSuffix(content[path], "\n") + "\n" + e.Content
		}
	}
	if err := errors.Join(untrusted.RemoveAll(dir), untrusted.MkdirAll(dir, 0o755)); err != nil {
		return nil, err
	}
	imports = slices.Sorted(maps.Keys(content))
	for _, path := range imports {
		if err := checkDropIn(path, content[path]); err != nil {
			return nil, err
		}
		if err := untrusted.WriteFile(path, []byte(content[path]), 0o600); err != nil {
			return nil, err
		}
	}
	return imports, nil
}

// checkDropIn says where containerd would end on a file of the user: it says so only in its log.
func checkDropIn(path, text string) error {
	err := toml.Unmarshal([]byte(text), &table{})
	if wrong, ok := errors.AsType[*toml.DecodeError](err); ok {
		line, column := wrong.Position()
		path = fmt.Sprintf("%s:%d:%d", path, line, column)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; correct it in machine.files, or take it out", path, err)
	}
	return nil
}
