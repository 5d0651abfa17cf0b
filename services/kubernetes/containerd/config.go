package containerd

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	// dropInsDir has those drop-ins of /var/cri/conf.d that the configuration lays there.
	dropInsDir = "/etc/containerd/conf.d"

	// oomScoreAdj is also the kubelet's default: the kernel ends all pods before these two.
	oomScoreAdj = -999
)

// table is a TOML table; containerd's plugin options are free-form, so its
// configuration is too.
type table = map[string]any

//go:embed config.yaml
var configYAML embed.FS

var configTemplate = render.Templates(configYAML, "config.yaml")

// renderConfig is containerd's own configuration.
// The user's drop-ins are merged over it by containerd (acceptance S-143), out of dropInsDir. It may hold passwords of registries.
func renderConfig(mode boot.Mode, r config.Registries) ([]byte, error) {
	var t table
	if err := render.YAML(configTemplate, "config.yaml", table{
		"OOMScore": oomScoreAdj, "Root": boot.ContainerdDir, "DropIns": filepath.Join(dropInsDir, "*.toml"), "Socket": Socket,
		"CNIBin": boot.CNIBinDir, "CNIConf": boot.CNIConfDir, "Container": mode == boot.Container,
		"Pause": config.DefaultPauseImage, "Hosts": hostsDir, "Logins": logins(r),
	}, &t); err != nil {
		return nil, err
	}
	return toml.Marshal(t)
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
