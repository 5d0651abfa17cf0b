package containerd

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"
)

func mirror(t *testing.T, endpoints ...string) config.Mirror {
	t.Helper()
	var m config.Mirror
	for _, e := range endpoints {
		u, err := config.ParseURL(e)
		if err != nil {
			t.Fatal(err)
		}
		m.Endpoints = append(m.Endpoints, u)
	}
	return m
}

// S-126, S-127, S-129: the path is asked of each endpoint as it is, '*' is every
// registry, plain http and a trailing slash are fine.
func TestS127MirrorHosts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		registry, dir string
		endpoints     []string
		want          []string
	}{
		{"*", "_default", []string{"http://10.5.0.1:6000/"}, []string{"http://10.5.0.1:6000/v2"}},
		{"docker.io", "docker.io", []string{"https://a.example", "https://b.example/cache"}, []string{"https://a.example/v2", "https://b.example/cache/v2"}},
		{"ghcr.io", "ghcr.io", []string{"https://a.example/x/v2/"}, []string{"https://a.example/x/v2"}},
	} {
		files := hostFiles(config.Registries{Mirrors: map[string]config.Mirror{tt.registry: mirror(t, tt.endpoints...)}})
		if len(files) != 1 || files[0].path != tt.dir+"/hosts.toml" {
			t.Errorf("%s: no hosts.toml in %s: %v", tt.registry, tt.dir, files)
			continue
		}
		data := files[0].data
		var parsed struct {
			Host map[string]struct {
				Capabilities []string `toml:"capabilities"`
				OverridePath bool     `toml:"override_path"`
			} `toml:"host"`
		}
		if err := toml.Unmarshal(data, &parsed); err != nil {
			t.Errorf("%s: %v in\n%s", tt.registry, err, data)
			continue
		}
		at := -1
		for _, want := range tt.want {
			host, ok := parsed.Host[want]
			if !ok || !host.OverridePath || len(host.Capabilities) != 3 {
				t.Errorf("%s: endpoint %s is missing or not as wanted in\n%s", tt.registry, want, data)
			}
			// The order of the endpoints is the order in which they are asked.
			if i := strings.Index(string(data), want); i < at {
				t.Errorf("%s: %s is out of order in\n%s", tt.registry, want, data)
			} else {
				at = i
			}
		}
	}
}

// S-143: drop-ins of the user are merged over our configuration.
func TestS143ConfigImportsDropIns(t *testing.T) {
	t.Parallel()
	for mode, restrict := range map[boot.Mode]bool{boot.Machine: false, boot.Container: true} {
		data, err := renderConfig(mode, config.Registries{}, []string{"/a.toml", "/b.toml"})
		if err != nil {
			t.Fatal(err)
		}
		var parsed struct {
			Version  int
			Disabled []string `toml:"disabled_plugins"`
			OOM      int      `toml:"oom_score"`
			Imports  []string
			Plugins  map[string]struct {
				Restrict bool `toml:"restrict_oom_score_adj"`
				Pull     bool `toml:"image_pull_with_sync_fs"`
				Sync     bool `toml:"sync_fs"`
			}
		}
		if err := toml.Unmarshal(data, &parsed); err != nil {
			t.Fatalf("%v in\n%s", err, data)
		}
		if !slices.Equal(parsed.Imports, []string{"/a.toml", "/b.toml"}) {
			t.Errorf("imports %v", parsed.Imports)
		}
		// Each of them runs what a pod may have left on the disk.
		for _, plugin := range []string{"internal.v1.opt", "image-verifier.v1.bindir", "monitor.container.v1.restart", "nri.v1.nri"} {
			if !slices.Contains(parsed.Disabled, "io.containerd."+plugin) {
				t.Errorf("the plugin %s is on", plugin)
			}
		}
		if parsed.OOM != -999 {
			t.Errorf("%v: oom_score %d", mode, parsed.OOM)
		}
		if got := parsed.Plugins["io.containerd.cri.v1.runtime"].Restrict; got != restrict {
			t.Errorf("%v: restrict_oom_score_adj %v, want %v", mode, got, restrict)
		}
		// A container node shares its host's power, and its host's file system.
		pulls, unpacks := parsed.Plugins["io.containerd.cri.v1.images"].Pull, parsed.Plugins["io.containerd.service.v1.diff-service"].Sync
		if pulls == restrict || unpacks == restrict {
			t.Errorf("%v: layers are synced: %v, %v, want %v", mode, pulls, unpacks, !restrict)
		}
	}
}

// Only what the configuration lays in /var/cri/conf.d gets to containerd, with its content. Links, pipes and endless
// files that something else has put in the way are gone before anything is read.
func TestDropInsAreTheConfigurations(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	dir, path := filepath.Join(top, "conf.d"), filepath.Join(top, "conf.d/a.toml")
	for range 2 {
		imports, err := writeDropIns(dir, []config.File{
			{Path: boot.CRIConfDir + "/a.toml", Content: "[metrics]", Op: config.FileAppend},
			{Path: boot.CRIConfDir + "/a.toml", Content: "x = 1\n", Op: config.FileAppend},
			{Path: boot.CRIConfDir + "/notes.txt", Content: "["},
			{Path: "/etc/other.toml", Content: "y"},
		})
		must(t, err)
		all, err := filepath.Glob(filepath.Join(dir, "*"))
		must(t, err)
		if want := []string{path}; !slices.Equal(all, want) || !slices.Equal(imports, want) {
			t.Errorf("there are %q, and containerd reads %q", all, imports)
		}
		text, err := os.ReadFile(path)
		if must(t, err); string(text) != "[metrics]\nx = 1\n" {
			t.Errorf("a.toml is %q", text)
		}
		must(t, os.Remove(path))
		must(t, os.Symlink("/dev/zero", path))
		must(t, unix.Mkfifo(filepath.Join(dir, "evil.toml"), 0o600))
	}
}

// A drop-in that containerd can't read is named, with the place.
func TestBrokenDropInIsNamed(t *testing.T) {
	t.Parallel()
	_, err := writeDropIns(filepath.Join(t.TempDir(), "conf.d"), []config.File{
		{Path: boot.CRIConfDir + "/metrics.toml", Content: "[metrics]\n  address = \"0.0.0.0:11234\"\n"}, // S-144
		{Path: boot.CRIConfDir + "/bad.toml", Content: "[metrics]\naddress = \n"},
	})
	if err == nil || !strings.Contains(err.Error(), "bad.toml:2:") {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
