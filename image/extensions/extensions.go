// Package extensions has the worked examples of extensions (boot/extension): manifests, and what they take out of
// Debian's packages.
package extensions

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/progress"
)

var (
	//go:embed iscsi-tools.yaml
	iscsiTools string
	//go:embed guest-agent.yaml
	guestAgent string
)

// example is an extension with a service.
type example struct {
	name, manifest string
	tools          []debian.Tool
	empty          []string // files to mount on
}

var examples = []example{
	{name: "iscsi-tools", manifest: iscsiTools, tools: []debian.Tool{
		{Package: "open-iscsi", Name: "iscsid", Why: "keeps the sessions"},
		{Package: "open-iscsi", Name: "iscsiadm", Why: "is what storage calls"},
	}},
	{name: "guest-agent", manifest: guestAgent, tools: []debian.Tool{
		{Package: "qemu-guest-agent", Name: "qemu-ga", Why: "the agent"},
	}, empty: []string{"etc/os-release"}},
}

// links are where programs and their dynamic linker look.
var links = map[string]string{"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}

// Build makes the examples, and returns their directories by name.
func Build(ctx context.Context, store *cache.Store, r *progress.Reporter) (map[string]string, error) {
	dirs := map[string]string{}
	for _, e := range examples {
		set := debian.Set{Name: e.name, Tools: e.tools, Tree: extension.RootFS}
		from, err := set.Build(ctx, store, r)
		if err != nil {
			return nil, err
		}
		step := "extension " + e.name
		r.Plan(step)
		dirs[e.name], err = r.Build(ctx, store, step, append([]string{from, e.manifest, fmt.Sprint(links)}, e.empty...), func(_ context.Context, dir string) error {
			return e.write(from, dir)
		})
		if err != nil {
			return nil, err
		}
	}
	return dirs, nil
}

// write makes the directory of an extension out of the files of the packages.
func (e example) write(from, dir string) error {
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		return err
	}
	root := filepath.Join(dir, extension.RootFS)
	version, err := e.version(root)
	if err != nil {
		return err
	}
	manifest := strings.Replace(e.manifest, "VERSION", fmt.Sprintf("%q", version), 1)
	if _, err := extension.Parse([]byte(manifest)); err != nil {
		return err
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			return err
		}
	}
	for _, name := range e.empty {
		path := filepath.Join(root, name)
		if err := cmp.Or(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, extension.ManifestFile), []byte(manifest), 0o644)
}

// version is that of the first tool's package, without its epoch.
func (e example) version(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, debian.PackagesFolder, e.name))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if key, ours := strings.CutPrefix(line, e.tools[0].Package+"="); ours {
			version, _, _ := strings.Cut(key, "@")
			if epoch := strings.Index(version, ":"); epoch >= 0 {
				version = version[epoch+1:]
			}
			return version, nil
		}
	}
	return "", errors.New(e.tools[0].Package + " isn't in the list of packages")
}
