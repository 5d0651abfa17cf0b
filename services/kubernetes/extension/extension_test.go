package extension

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
)

const manifest = `name: agent
version: "1.0"
description: a test
service:
  command: [/bin/agent, -v]
  environment: {B: "2", A: "1"}
  dependsOn: [networkd]
  waitFor: [/dev/channel]
  mounts: [{source: /dev}, {source: /etc/os-release, readOnly: true}]
  restart: onFailure
`

// Each extension is published, its service is one of the node's, and one that can't be used is in the log.
func TestServices(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, text := range map[string]string{
		"agent": manifest, "broken": "name: other\n", "firmware": "name: firmware\nversion: \"2\"\ndescription: files\n",
	} {
		dir := filepath.Join(root, extension.Dir, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, extension.ManifestFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var console bytes.Buffer
	store := resource.NewStore()
	services := Services(Options{Store: store, Root: root, Log: logs.New(&console).Logger(ID)})
	if len(services) != 1 {
		t.Fatalf("there are %d services", len(services))
	}
	s := services[0]
	if s.ID != "ext-agent" || s.Kind != dag.Container || s.Restart != dag.RestartOnError || !slices.Equal(s.DependsOn, []string{"containerd", "networkd"}) {
		t.Errorf("%+v", s)
	}
	if len(s.Needs) != 1 || s.Needs[0].String() != `file "/dev/channel" to exist` {
		t.Errorf("it waits for %v", s.Needs)
	}
	if got := console.String(); !strings.Contains(got, "broken/extension.yaml") {
		t.Errorf("the console has %q", got)
	}
	got := map[string]Status{}
	for _, o := range Statuses.List(store) {
		got[o.ID] = o.Spec
	}
	want := map[string]Status{"agent": {"1.0", "ext-agent", "a test"}, "firmware": {"2", "", "files"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A default with the name of the node isn't written before the name is known.
func TestDefaultsWithHostname(t *testing.T) {
	t.Parallel()
	for content, want := range map[string][]string{
		"id ${machineID}":  {"containerd"},
		"name ${hostname}": {"containerd", "networkd"},
	} {
		s := service{Manifest: extension.Manifest{Service: &extension.Service{Defaults: []extension.Default{{Path: "/var/a", Content: "-"}, {Path: "/var/b", Content: content}}}}}
		if got := s.dag(nil).DependsOn; !slices.Equal(got, want) {
			t.Errorf("with the default %q, it depends on %q", content, got)
		}
		s.Service.DependsOn = []string{"networkd"}
		if got := s.dag(nil).DependsOn; !slices.Equal(got, []string{"containerd", "networkd"}) {
			t.Errorf("with the default %q and a dependency, it depends on %q", content, got)
		}
	}
}

// A service has the network of the node, and of its privileges only those that its manifest asks for.
func TestSpec(t *testing.T) {
	t.Parallel()
	for _, privileged := range []bool{false, true} {
		m, err := extension.Parse([]byte(manifest))
		if err != nil {
			t.Fatal(err)
		}
		m.Service.Privileged, m.Service.HostPID = privileged, privileged
		spec, err := oci.GenerateSpec(namespaces.WithNamespace(context.Background(), "system"), nil, &containers.Container{ID: "x"},
			append([]oci.SpecOpts{oci.WithRootFSPath("/root")}, service{Manifest: m}.spec()...)...)
		if err != nil {
			t.Fatal(err)
		}
		if !spec.Root.Readonly || spec.Root.Path != "/root" || !slices.Equal(spec.Process.Args, []string{"/bin/agent", "-v"}) {
			t.Errorf("%+v %+v", spec.Root, spec.Process.Args)
		}
		if !slices.Contains(spec.Process.Env, "A=1") || spec.Linux.CgroupsPath != "/system/ext-agent" {
			t.Errorf("%v, %s", spec.Process.Env, spec.Linux.CgroupsPath)
		}
		var namespaces []string
		for _, n := range spec.Linux.Namespaces {
			namespaces = append(namespaces, string(n.Type))
		}
		if slices.Contains(namespaces, "network") || slices.Contains(namespaces, "pid") == privileged || !slices.Contains(namespaces, "mount") {
			t.Errorf("privileged %v: it has the namespaces %v", privileged, namespaces)
		}
		if slices.Contains(spec.Process.Capabilities.Effective, "CAP_SYS_ADMIN") != privileged || spec.Process.NoNewPrivileges == privileged {
			t.Errorf("privileged %v: %v", privileged, spec.Process.Capabilities.Effective)
		}
		mounts := map[string][]string{}
		for _, m := range spec.Mounts {
			mounts[m.Destination] = m.Options
		}
		if !slices.Contains(mounts["/etc/os-release"], "rro") || !slices.Contains(mounts["/dev"], "rbind") || mounts["/etc/resolv.conf"] == nil {
			t.Errorf("it has the mounts %v", mounts)
		}
	}
}
