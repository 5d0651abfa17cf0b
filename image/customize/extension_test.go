package customize

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/tools/testing/module"
)

const manifest = `name: NAME
version: 1.2.3
description: a test
files: [/usr/local/bin, /lib/firmware/nic.bin]
`

const withService = manifest + `service:
  command: [/bin/agent, -v]
  dependsOn: [networkd]
  mounts:
    - source: /var/lib/agent
    - source: /dev
      destination: /host/dev
    - source: /run/lock
      destination: /var/run/lock
`

// extensionDir is the directory of an extension.
func extensionDir(t *testing.T, name, text string, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	put(t, dir, map[string]string{extension.ManifestFile: strings.ReplaceAll(text, "NAME", name)})
	put(t, dir, files)
	return dir
}

// Several extensions are in one system, each with its manifest and with what its service needs.
func TestExtensions(t *testing.T) {
	t.Parallel()
	agent := extensionDir(t, "agent", withService, map[string]string{"rootfs/bin/agent": "program", "files/usr/local/bin/tool": "tool"})
	// As in Debian's packages. It leads to /run of the container, not of the node.
	if err := errors.Join(os.MkdirAll(filepath.Join(agent, "rootfs/var"), 0o755), os.Symlink("/run", filepath.Join(agent, "rootfs/var/run"))); err != nil {
		t.Fatal(err)
	}
	firmware := extensionDir(t, "firmware", manifest, map[string]string{"files/lib/firmware/nic.bin": "firmware"})
	after := extensionDir(t, "after", manifest+"service: {command: [/bin/agent], dependsOn: [ext-agent]}\n", map[string]string{"rootfs/bin/agent": "program"})
	dir, second := base(t), base(t)
	for _, d := range []string{dir, second} {
		if err := (Change{Extensions: []string{agent, firmware, after}}).Apply(t.Context(), d, silent); err != nil {
			t.Fatal(err)
		}
	}
	i, tree, _ := opened(t, dir)
	if again, _, _ := opened(t, second); again.SHA256 != i.SHA256 {
		t.Error("the same extensions give other bytes")
	}
	own := extension.Dir + "/agent/"
	for name, want := range map[string]string{
		own + extension.ManifestFile: strings.ReplaceAll(withService, "NAME", "agent"), own + "rootfs/bin/agent": "program",
		"usr/local/bin/tool": "tool", "usr/lib/firmware/nic.bin": "firmware",
	} {
		if got, err := tree.ReadFile(name); string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"proc", "dev", "tmp", "host/dev", "var/lib/agent", "run/lock"} {
		if f, there := tree[own+"rootfs/"+name]; !there || !f.Mode.IsDir() {
			t.Errorf("rootfs has no directory %s to mount on", name)
		}
	}
	if _, there := tree["run/lock"]; there {
		t.Error("a place to mount on is outside of rootfs")
	}
	if f := tree[own+"rootfs/etc/resolv.conf"]; !f.Mode.IsRegular() || f.Size != 0 {
		t.Error("rootfs has no file etc/resolv.conf to mount on")
	}
	text, err := tree.ReadFile(ProvenanceFile)
	var p Provenance
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil || len(p.Steps) != 1 || len(p.Steps[0].Added) != 3 || p.Steps[0].Added[0].Name != "extension agent" || p.Steps[0].Added[0].Version != "1.2.3" || len(p.Steps[0].Added[0].Files) != 3 {
		t.Errorf("%s, %v", text, err)
	}
	if text, err = tree.ReadFile(sbom.File); err != nil || !strings.Contains(string(text), `"name": "extension firmware"`) {
		t.Errorf("%s, %v", text, err)
	}
	if err := (Change{Remove: []string{own + extension.ManifestFile}}).Apply(t.Context(), dir, silent); err == nil || !strings.Contains(err.Error(), "extension after: its service depends on ext-agent") {
		t.Errorf("what another extension needs is removed: %v", err)
	}
	// It isn't added a second time, and can be removed.
	if err := (Change{Extensions: []string{firmware}}).Apply(t.Context(), dir, silent); err == nil || !strings.Contains(err.Error(), "the system has an extension firmware already") {
		t.Errorf("%v", err)
	}
	if err := (Change{Remove: []string{extension.Dir + "/firmware", "/lib/firmware/nic.bin"}, Extensions: []string{firmware}}).Apply(t.Context(), dir, silent); err != nil {
		t.Error(err)
	}
}

func TestExtensionRefusals(t *testing.T) {
	t.Parallel()
	file := map[string]string{"files/usr/local/bin/tool": "tool"}
	agent := map[string]string{"rootfs/bin/agent": "program"}
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write(module.Module(release))
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	const anywhere = "/lib/modules, /usr/local, /usr/local/link"
	linked := extensionDir(t, "a", strings.Replace(manifest, "/usr/local/bin", anywhere, 1), map[string]string{"files/usr/local/x": "x", "files/etc/other": "x"})
	if err := os.Symlink("/etc", filepath.Join(linked, "files/usr/local/link")); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		extensions []string
		want       string
	}{
		"no manifest":                    {[]string{t.TempDir()}, "extension.yaml: no such file"},
		"same file":                      {[]string{extensionDir(t, "a", manifest, file), extensionDir(t, "b", manifest, file)}, "/usr/local/bin/tool: extension a has this file, too"},
		"file elsewhere":                 {[]string{extensionDir(t, "a", manifest, map[string]string{"files/etc/other": "x"})}, "/etc/other: the manifest doesn't have it below files"},
		"replaced":                       {[]string{extensionDir(t, "a", strings.Replace(manifest, "/usr/local/bin", "/etc", 1), map[string]string{"files/etc/motd": "x"})}, "/etc/motd: the system has this file"},
		"elsewhere by a link of its own": {[]string{linked}, "/etc/other: the manifest doesn't have it below files"},
		"replaced, and compressed": {[]string{extensionDir(t, "a", strings.Replace(manifest, "/usr/local/bin", anywhere, 1), map[string]string{
			"files/" + modulesDir + "/" + release + "/kernel/usb.ko.gz": packed.String(),
		})}, "/kernel/usb.ko: the system has this file"},
		"same name":       {[]string{extensionDir(t, "a", manifest, nil), extensionDir(t, "a", manifest, nil)}, "the system has an extension a already"},
		"no program":      {[]string{extensionDir(t, "a", withService, map[string]string{"rootfs/bin/other": "x"})}, "rootfs has no /bin/agent"},
		"a directory":     {[]string{extensionDir(t, "a", withService, map[string]string{"rootfs/bin/agent/x": "x"})}, "/bin/agent of rootfs isn't executable"},
		"unknown service": {[]string{extensionDir(t, "a", manifest+"service: {command: [/bin/agent], dependsOn: [ext-b]}\n", agent)}, "its service depends on ext-b"},
		"a circle": {[]string{
			extensionDir(t, "a", manifest+"service: {command: [/bin/agent], dependsOn: [ext-b]}\n", agent),
			extensionDir(t, "b", manifest+"service: {command: [/bin/agent], dependsOn: [ext-a]}\n", agent),
		}, "extension b: its service depends on ext-a, which no extension has, or which depends on it"},
	} {
		dir := base(t)
		before, _, _ := opened(t, dir)
		if err := (Change{Extensions: c.extensions}).Apply(t.Context(), dir, silent); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if after, _, _ := opened(t, dir); after.SHA256 != before.SHA256 {
			t.Errorf("%s: the system has changed", name)
		}
	}
}
