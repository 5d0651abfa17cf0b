package customize

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/image/squashfs"
)

// StageExtensions is the directory of a stage of Docker in which extensions are, instead of files for the root file
// system.
const StageExtensions = "extensions"

// extend adds the extensions.
func (w *work) extend() error {
	owners := map[string]string{} // path → extension
	for _, dir := range w.Extensions {
		text, err := os.ReadFile(filepath.Join(dir, extension.ManifestFile))
		if err != nil {
			return fmt.Errorf("extension %s: %w", dir, err)
		}
		m, err := extension.Parse(text)
		if err == nil {
			err = w.extendBy(m, dir, text, owners)
		}
		if err != nil {
			return fmt.Errorf("extension %s: %w", filepath.Join(dir, extension.ManifestFile), err)
		}
	}
	return w.checkExtensions() // also without an extension to add: what the others need may be removed
}

func (w *work) extendBy(m extension.Manifest, dir string, manifest []byte, owners map[string]string) error {
	base := path.Join(extension.Dir, m.Name)
	if _, there := w.tree[path.Join(base, extension.ManifestFile)]; there {
		return fmt.Errorf("the system has an extension %s already: remove it first", m.Name)
	}
	noted := Added{Name: "extension " + m.Name, Version: m.Version}
	// Before the extension's own links are there: they would make other directories allowed.
	var allowed []string
	for _, name := range m.Files {
		allowed = append(allowed, "/"+w.end(name))
	}
	for _, part := range []struct{ dir, at string }{{extension.Files, ""}, {extension.RootFS, path.Join(base, extension.RootFS)}} {
		from := filepath.Join(dir, part.dir)
		if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := w.walk(&noted, from, part.at); err != nil {
			return err
		}
	}
	for _, f := range noted.Files {
		switch owner := owners[f.Path]; {
		case owner != "":
			return fmt.Errorf("%s: extension %s has this file, too", f.Path, owner)
		case f.Replaced:
			return fmt.Errorf("%s: the system has this file, and an extension replaces none (see overlays)", f.Path)
		case !strings.HasPrefix(f.Path, "/"+base+"/") && !slices.ContainsFunc(allowed, func(dir string) bool { return f.Path == dir || strings.HasPrefix(f.Path, dir+"/") }):
			return fmt.Errorf("%s: the manifest doesn't have it below files", f.Path)
		}
		owners[f.Path] = m.Name
	}
	w.makeDirectory(base)
	w.tree[path.Join(base, extension.ManifestFile)] = squashfs.Content(manifest, 0o644)
	w.step.Added = append(w.step.Added, noted)
	w.say(fmt.Sprintf("added extension %s %s: %s", m.Name, m.Version, count(len(noted.Files), "file")))
	if m.Service == nil {
		return nil
	}
	return w.prepareService(m.Service, path.Join(base, extension.RootFS))
}

// end is where a path leads, with a link at its end followed, too.
func (w *work) end(name string) string { return path.Dir(w.tree.Resolve(path.Join(name, ".x"))) }

// mountPoints are what each service has besides what its manifest names.
var mountPoints = []string{"/proc", "/dev", "/sys", "/run", "/tmp"}

// prepareService makes the places in the root file system of a service on which something is mounted: nothing can be
// made in it later.
func (w *work) prepareService(s *extension.Service, root string) error {
	// Links lead where they lead in the container.
	inside := squashfs.Tree{}
	for name, f := range w.tree {
		if below, ok := strings.CutPrefix(name, root+"/"); ok {
			inside[below] = f
		}
	}
	in := func(name string) string { return path.Join(root, inside.Resolve(name)) }
	switch f, there := w.tree[in(s.Command[0])]; {
	case !there:
		return fmt.Errorf("service.command: %s has no %s", extension.RootFS, s.Command[0])
	case f.Mode.IsDir() || f.Mode.IsRegular() && f.Mode&0o111 == 0:
		return fmt.Errorf("service.command: %s of %s isn't executable", s.Command[0], extension.RootFS)
	}
	directories := slices.Clone(mountPoints)
	for _, m := range s.Mounts {
		directories = append(directories, m.Destination)
	}
	for _, m := range extension.NodeFiles {
		w.makeDirectory(path.Dir(in(m.Destination)))
		w.tree[in(m.Destination)] = squashfs.Content(nil, 0o644)
	}
	for _, name := range directories {
		if _, there := w.tree[in(name)]; !there {
			w.makeDirectory(in(name))
		}
	}
	return nil
}

// makeDirectory makes a directory, and those above it.
func (w *work) makeDirectory(at string) {
	for ; at != "."; at = path.Dir(at) {
		if _, there := w.tree[at]; !there {
			w.tree[at] = squashfs.Directory(0o755)
		}
	}
}

// checkExtensions refuses services that depend on what isn't there.
func (w *work) checkExtensions() error {
	var all []extension.Manifest
	for name := range w.tree {
		if !strings.HasPrefix(name, extension.Dir+"/") || path.Base(name) != extension.ManifestFile || strings.Count(name, "/") != strings.Count(extension.Dir, "/")+2 {
			continue
		}
		text, err := w.tree.ReadFile(name)
		if err != nil {
			return err
		}
		m, err := extension.Parse(text)
		if err != nil {
			return fmt.Errorf("/%s: %w", name, err)
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b extension.Manifest) int { return strings.Compare(a.Name, b.Name) })
	_, err := extension.Startable(all)
	return err
}
