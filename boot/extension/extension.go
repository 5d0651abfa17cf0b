// Package extension is the format of extensions: software that is added to a system when it is built. An extension is a
// directory:
//
//	extension.yaml  the manifest
//	files/          is added to the root file system of a node
//	rootfs/         is the root file system of the container in which the extension's service runs
//
// In a system, each extension has its manifest and its rootfs in a directory of its own, in Dir. A node starts the
// services that it finds there.
package extension

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"gopkg.in/yaml.v3"
)

const (
	// Dir has the extensions of a system, without a leading slash.
	Dir = "usr/share/garboard/extensions"
	// ManifestFile, Files and RootFS are what an extension's directory has.
	ManifestFile = "extension.yaml"
	Files        = "files"
	RootFS       = "rootfs"
)

// Prefix is what the names of the services have before the extension's.
const Prefix = "ext-"

// NodeFiles are what each service sees of its node, besides what its manifest has.
var NodeFiles = []Mount{
	{Source: "/etc/resolv.conf", Destination: "/etc/resolv.conf", ReadOnly: true},
	{Source: "/etc/hosts", Destination: "/etc/hosts", ReadOnly: true},
	{Source: boot.CABundle, Destination: "/etc/ssl/certs/ca-certificates.crt", ReadOnly: true},
}

// Services of a node that a service may depend on.
var Services = []string{"balancer", "containerd", "disks", "etcd", "files", "kubelet", "machined", "networkd", "timed", "udevd"}

// When a service starts again after it has ended.
const (
	Always    = "always"
	OnFailure = "onFailure"
	Never     = "never"
)

// Manifest describes an extension.
type Manifest struct {
	Name        string   `yaml:"name"`
	Version     string   `yaml:"version"`
	Description string   `yaml:"description"`
	Files       []string `yaml:"files,omitempty"` // paths that may be added, with what is below them
	Service     *Service `yaml:"service,omitempty"`
}

// Service is a program that runs in a container, in the network of the node.
type Service struct {
	Command     []string          `yaml:"command"`
	Environment map[string]string `yaml:"environment,omitempty"`
	// DependsOn are services of the node, and of other extensions (ext-NAME). Each service also depends on containerd.
	DependsOn []string  `yaml:"dependsOn,omitempty"`
	WaitFor   []string  `yaml:"waitFor,omitempty"` // files of the node, such as devices
	Mounts    []Mount   `yaml:"mounts,omitempty"`
	Defaults  []Default `yaml:"defaults,omitempty"`
	// Privileged gives the service all capabilities and devices, and HostPID the processes of the node.
	Privileged bool   `yaml:"privileged,omitempty"`
	HostPID    bool   `yaml:"hostPID,omitempty"`
	Restart    string `yaml:"restart,omitempty"` // default Always
}

// Mount shows a file or directory of the node to a service.
type Mount struct {
	Source      string `yaml:"source"`
	Destination string `yaml:"destination,omitempty"` // default the source
	ReadOnly    bool   `yaml:"readOnly,omitempty"`
}

// Default is a file below /var that is written before the service starts, unless it exists. In its content,
// ${machineID} and ${hostname} are the node's.
type Default struct {
	Path    string `yaml:"path"`
	Content string `yaml:"content"`
}

var (
	name    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	version = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+~_-]*$`)
)

// Parse reads a manifest and checks it.
func Parse(text []byte) (Manifest, error) {
	var m Manifest
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&m); err != nil && !errors.Is(err, io.EOF) {
		return m, err
	}
	if s := m.Service; s != nil {
		s.Restart = cmp.Or(s.Restart, Always)
		for i, mount := range s.Mounts {
			if mount.Destination == "" {
				s.Mounts[i].Destination = mount.Source
			}
		}
	}
	return m, m.check()
}

// problems are all that is wrong with a manifest.
type problems []error

func (p *problems) add(is bool, format string, args ...any) {
	if is {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

func (m Manifest) check() error {
	var errs problems
	errs.add(!name.MatchString(m.Name), "name %q: must have 1 to 40 small letters, digits and hyphens", m.Name)
	errs.add(!version.MatchString(m.Version) || len(m.Version) > 64, "version %q: must have 1 to 64 letters, digits, and . + ~ _ -", m.Version)
	errs.add(m.Description == "", "description: is required")
	errs = append(errs, absolute("files", m.Files...))
	if m.Service != nil {
		errs = append(errs, m.Service.check())
	}
	return errors.Join(errs...)
}

func (s Service) check() error {
	var errs problems
	errs.add(len(s.Command) == 0, "service.command: is required")
	errs = append(errs, absolute("service.command", s.Command[:min(len(s.Command), 1)]...))
	for _, d := range s.DependsOn {
		other, ours := strings.CutPrefix(d, Prefix)
		errs.add(!slices.Contains(Services, d) && (!ours || !name.MatchString(other)),
			"service.dependsOn: %q is neither %sNAME of another extension nor one of %s", d, Prefix, strings.Join(Services, ", "))
	}
	errs = append(errs, absolute("service.waitFor", s.WaitFor...))
	for _, m := range s.Mounts {
		errs = append(errs, absolute("service.mounts", m.Source, m.Destination))
	}
	for _, d := range s.Defaults {
		errs = append(errs, absolute("service.defaults", d.Path))
		errs.add(!strings.HasPrefix(d.Path, "/var/"), "service.defaults: %s isn't below /var", d.Path)
	}
	errs.add(!slices.Contains([]string{Always, OnFailure, Never}, s.Restart),
		"service.restart %q: must be %s, %s or %s", s.Restart, Always, OnFailure, Never)
	return errors.Join(errs...)
}

// absolute refuses paths of which two spellings would be the same.
func absolute(field string, paths ...string) error {
	for _, p := range paths {
		if !path.IsAbs(p) || path.Clean(p) != p || p == "/" {
			return fmt.Errorf("%s: %q must be an absolute path without . and .., and not /", field, p)
		}
	}
	return nil
}

// Of reads the extensions of a system, from its root. Services whose dependencies aren't there, or are in a circle, are
// an error, as is a manifest that can't be used: the extensions that it returns have none of these.
func Of(system fs.FS) ([]Manifest, error) {
	dirs, err := fs.ReadDir(system, Dir)
	if err != nil {
		return nil, boot.IgnoreMissing(err)
	}
	var all []Manifest
	var errs []error
	for _, dir := range dirs {
		m, err := read(system, dir.Name())
		if err != nil {
			errs = append(errs, fmt.Errorf("/%s/%s/%s: %w", Dir, dir.Name(), ManifestFile, err))
			continue
		}
		all = append(all, m)
	}
	all, err = Startable(all)
	return all, errors.Join(append(errs, err)...)
}

func read(system fs.FS, dir string) (Manifest, error) {
	text, err := fs.ReadFile(system, path.Join(Dir, dir, ManifestFile))
	if err != nil {
		return Manifest{}, err
	}
	m, err := Parse(text)
	if err == nil && m.Name != dir {
		err = fmt.Errorf("name %q: the directory has another one", m.Name)
	}
	return m, err
}

// Startable leaves out the extensions whose services can't start because of what they depend on, and names them in the
// error.
func Startable(all []Manifest) ([]Manifest, error) {
	ready := map[string]bool{}
	for _, s := range Services {
		ready[s] = true
	}
	left := slices.Clone(all)
	for found := true; found; {
		found = false
		left = slices.DeleteFunc(left, func(m Manifest) bool {
			ok := m.Service == nil || !slices.ContainsFunc(m.Service.DependsOn, func(d string) bool { return !ready[d] })
			if ok {
				// One without a service can't be waited for.
				ready[Prefix+m.Name], found = m.Service != nil, true
			}
			return ok
		})
	}
	var errs []error
	for _, m := range left {
		missing := slices.DeleteFunc(slices.Clone(m.Service.DependsOn), func(d string) bool { return ready[d] })
		errs = append(errs, fmt.Errorf("extension %s: its service depends on %s, which no extension has, or which depends on it", m.Name, strings.Join(missing, ", ")))
	}
	return slices.DeleteFunc(all, func(m Manifest) bool {
		return slices.ContainsFunc(left, func(l Manifest) bool { return l.Name == m.Name })
	}), errors.Join(errs...)
}
