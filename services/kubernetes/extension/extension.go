// Package extension runs what was added to the system: the services of its extensions (boot/extension), each in a
// container of its own, in the network of the node. Their root file systems are part of the system, and read-only.
package extension

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// ID owns the resources, and is the log.
	ID = "extensions"

	stopBudget = 10 * time.Second
	// oomScoreAdj: pods are ended before what the node's storage may depend on.
	oomScoreAdj = -900

	// hostname in the content of a default is the node's.
	hostname = "${hostname}"
)

// Status is an extension of the system.
type Status struct {
	Version     string `yaml:"version" column:"RELEASE"`
	Service     string `yaml:"service,omitempty" column:"SERVICE"`
	Description string `yaml:"description" column:"DESCRIPTION"`
}

// Statuses has an object for each extension; its ID is the extension's name.
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "Extensions.runtime.garboard.dev",
	Kind:      "Extension",
	Aliases:   []string{"extension"},
	Namespace: "runtime",
})

// Options are what the extensions stand on.
type Options struct {
	Store      *resource.Store
	Containerd *containerd.Containerd
	Log        *slog.Logger
	Root       string // of the system; "": /
}

// Services publishes the extensions and returns their services. One that can't be used is in the log, and nothing else
// is missing: what was added to a system doesn't keep the node from running.
func Services(o Options) []dag.Service {
	root := cmp.Or(o.Root, "/")
	all, err := extension.Of(os.DirFS(root))
	if err != nil {
		o.Log.Error("an extension of this system isn't used", "err", err)
	}
	var services []dag.Service
	for _, m := range all {
		status := Status{Version: m.Version, Description: m.Description}
		if m.Service != nil {
			s := service{Manifest: m, root: filepath.Join(root, extension.Dir, m.Name, extension.RootFS)}
			services = append(services, s.dag(o.Containerd))
			status.Service = s.id()
		}
		if err := Statuses.Put(o.Store.As(ID), m.Name, status); err != nil {
			o.Log.Error("publish an extension", "extension", m.Name, "err", err)
		}
	}
	return services
}

// service is the one of an extension.
type service struct {
	extension.Manifest
	root string // of its container
}

func (s service) id() string { return extension.Prefix + s.Name }

var restarts = map[string]dag.RestartPolicy{
	extension.Always: dag.RestartAlways, extension.OnFailure: dag.RestartOnError, extension.Never: dag.RestartNever,
}

func (s service) dag(c *containerd.Containerd) dag.Service {
	runner := &containerd.Runner{
		Containerd: c, ID: s.id(), RootFS: s.root,
		Spec:       func(context.Context) ([]oci.SpecOpts, error) { return s.spec(), nil },
		StopBudget: stopBudget, OOMScoreAdj: oomScoreAdj,
	}
	needs := lists.Of(s.Service.WaitFor, func(file string) dag.Condition { return dag.File(file) })
	dependsOn := append([]string{containerd.ID}, s.Service.DependsOn...)
	// The name of the node is known when the network is up, and a default is written only once.
	if !slices.Contains(dependsOn, network.ID) && slices.ContainsFunc(s.Service.Defaults, func(d extension.Default) bool { return strings.Contains(d.Content, hostname) }) {
		dependsOn = append(dependsOn, network.ID)
	}
	return dag.Service{
		ID: s.id(), Kind: dag.Container,
		DependsOn: dependsOn,
		Needs:     needs,
		Prepare:   func(context.Context, *dag.Handle) error { return s.prepare() },
		Run: func(ctx context.Context, h *dag.Handle) error {
			err := runner.Run(ctx, h)
			if exit, ended := errors.AsType[*containerd.ExitError](err); ended && exit.Status == 0 {
				return nil
			}
			return err
		},
		Restart:    restarts[s.Service.Restart],
		StopBudget: stopBudget + 5*time.Second,
	}
}

// prepare writes what the service has by default, and makes the directories that it mounts.
func (s service) prepare() error {
	id, err := os.ReadFile(boot.MachineIDFile)
	host, none := os.Hostname()
	if err = cmp.Or(err, none); err != nil {
		return err
	}
	fill := strings.NewReplacer("${machineID}", strings.TrimSpace(string(id)), hostname, host)
	for _, d := range s.Service.Defaults {
		if _, err := untrusted.Stat(d.Path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := errors.Join(untrusted.MkdirAll(filepath.Dir(d.Path), 0o700), untrusted.WriteFile(d.Path, []byte(fill.Replace(d.Content)), 0o600)); err != nil {
			return err
		}
	}
	for _, m := range s.Service.Mounts {
		if _, err := untrusted.Stat(m.Source); errors.Is(err, fs.ErrNotExist) && (strings.HasPrefix(m.Source, "/var/") || strings.HasPrefix(m.Source, "/run/")) {
			if err := untrusted.MkdirAll(m.Source, 0o700); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s service) spec() []oci.SpecOpts {
	mounts := []specs.Mount{{Type: "tmpfs", Source: "tmpfs", Destination: "/tmp", Options: []string{"nosuid", "nodev", "size=64m", "mode=1777"}}}
	for _, m := range slices.Concat(extension.NodeFiles, s.Service.Mounts) {
		access := "rw"
		if m.ReadOnly {
			access = "rro" // "ro" is only for the mount at the top
		}
		mounts = slices.DeleteFunc(mounts, func(old specs.Mount) bool { return old.Destination == m.Destination })
		mounts = append(mounts, specs.Mount{Type: "bind", Source: m.Source, Destination: m.Destination, Options: []string{"rbind", "rslave", access}})
	}
	var environment []string
	for name, value := range s.Service.Environment {
		environment = append(environment, name+"="+value)
	}
	slices.Sort(environment)
	options := []oci.SpecOpts{
		oci.WithRootFSReadonly(),
		oci.WithProcessArgs(s.Service.Command...),
		oci.WithEnv(environment),
		oci.WithHostNamespace(specs.NetworkNamespace),
		oci.WithHostNamespace(specs.UTSNamespace),
		oci.WithCgroup(boot.SystemCgroup + "/" + s.id()),
		oci.WithMounts(mounts),
	}
	if s.Service.HostPID {
		options = append(options, oci.WithHostNamespace(specs.PIDNamespace))
	}
	if s.Service.Privileged {
		options = append(options, oci.WithPrivileged, oci.WithAllDevicesAllowed, oci.WithNewPrivileges)
	}
	return options
}
