package containerd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/pelletier/go-toml/v2"
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
		data, err := renderConfig(mode, config.Registries{})
		if err != nil {
			t.Fatal(err)
		}
		var parsed struct {
			Version int
			OOM     int `toml:"oom_score"`
			Imports []string
			Plugins map[string]struct {
				Restrict bool `toml:"restrict_oom_score_adj"`
				Pull     bool `toml:"image_pull_with_sync_fs"`
				Sync     bool `toml:"sync_fs"`
			}
		}
		if err := toml.Unmarshal(data, &parsed); err != nil {
			t.Fatalf("%v in\n%s", err, data)
		}
		if len(parsed.Imports) != 1 || parsed.Imports[0] != "/etc/containerd/conf.d/*.toml" {
			t.Errorf("imports %v", parsed.Imports)
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

// Only what the configuration lays in /var/cri/conf.d gets to containerd, with its content.
func TestDropInsAreTheConfigurations(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "conf.d")
	for range 2 {
		must(t, writeDropIns(dir, []config.File{
			{Path: boot.CRIConfDir + "/a.toml", Content: "[metrics]", Op: config.FileAppend},
			{Path: boot.CRIConfDir + "/a.toml", Content: "x = 1\n", Op: config.FileAppend},
			{Path: "/etc/other.toml", Content: "y"},
		}))
		all, err := filepath.Glob(filepath.Join(dir, "*"))
		must(t, err)
		if len(all) != 1 {
			t.Errorf("there are %q", all)
		}
		text, err := os.ReadFile(filepath.Join(dir, "a.toml"))
		if must(t, err); string(text) != "[metrics]\nx = 1\n" {
			t.Errorf("a.toml is %q", text)
		}
		write(t, filepath.Join(dir, "evil.toml"), "") // gone at the next start
	}
}

// A drop-in that containerd can't read is named, with the place.
func TestBrokenDropInIsNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "metrics.toml"), "[metrics]\n  address = \"0.0.0.0:11234\"\n") // S-144
	write(t, filepath.Join(dir, "notes.txt"), "[")
	if err := checkDropIns(dir); err != nil {
		t.Error(err)
	}
	write(t, filepath.Join(dir, "bad.toml"), "[metrics]\naddress = \n")
	if err := checkDropIns(dir); err == nil || !strings.Contains(err.Error(), "bad.toml:2:") {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
