// Package etcd runs this node's member of the Kubernetes etcd cluster.
//
// etcd is an OCI image in containerd's system namespace, on control planes
// only. A node of type init starts a cluster of one when its data directory is
// empty; with data it goes on with what it has, whatever the type says
// (acceptance S-212, S-224).
package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"sort"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/containerd"
	"github.com/garboard-os/garboard/services/controlplane"
	"github.com/garboard-os/garboard/services/dag"
	"github.com/garboard-os/garboard/services/machine"
	"github.com/garboard-os/garboard/services/network"
	"github.com/garboard-os/garboard/services/resource"
	"github.com/garboard-os/garboard/services/secrets"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const (
	// ID of the service and its container.
	ID = "etcd"

	secretsDir = boot.SecretsDir + "/" + secrets.EtcdID // written there by package secrets
	clientPort = 2379                                   // IANA etcd-client
	peerPort   = 2380                                   // IANA etcd-server
	// healthURL is plain HTTP on loopback: the probe needs no certificate, and
	// nothing but health and metrics answers there.
	healthURL  = "http://127.0.0.1:2381"
	healthPath = "/readyz"

	healthPeriod  = time.Second
	healthTimeout = 5 * time.Second
	// stopBudget lets a leader hand over and the backend sync.
	stopBudget = 10 * time.Second
	// autoCompaction keeps five minutes of history, as the apiserver's own
	// compaction does.
	autoCompaction = "5m"
)

// Options are what the service stands on.
type Options struct {
	Mode       boot.Mode
	Store      *resource.Store
	Containerd *containerd.Containerd
}

// Service is etcd in the graph.
func Service(o Options) dag.Service {
	runner := &containerd.Runner{
		Containerd: o.Containerd,
		ID:         ID,
		Image:      o.image,
		Spec:       o.spec,
		StopBudget: stopBudget,
	}
	return dag.Service{
		ID:        ID,
		Kind:      dag.Container,
		DependsOn: []string{containerd.ID, "networkd", "timed"},
		Needs:     []dag.Condition{certificates{o}},
		Skip:      o.skip,
		Prepare: func(ctx context.Context, h *dag.Handle) error {
			if err := o.prepareData(); err != nil {
				return err
			}
			return runner.Prepare(ctx, h)
		},
		Run: func(ctx context.Context, h *dag.Handle) error {
			defer o.publish(false)
			return runner.Run(ctx, h)
		},
		Health:     &dag.Health{Check: o.healthy, Period: healthPeriod, Timeout: healthTimeout},
		Restart:    dag.RestartAlways,
		StopBudget: stopBudget + 5*time.Second,
	}
}

// certificates waits for those of etcd, which a worker never gets: there it
// holds as soon as the configuration says so, and the service is skipped.
type certificates struct{ o Options }

func (certificates) String() string { return "etcd certificates to be made" }

func (c certificates) Wait(ctx context.Context) error {
	known := machine.Configs.When(c.o.Store, machine.ConfigID, "a configuration", func(*config.Config) bool { return true })
	if err := known.Wait(ctx); err != nil {
		return err
	}
	if c.o.skip() != "" {
		return nil
	}
	return secrets.Statuses.When(c.o.Store, secrets.EtcdID, c.String(), func(secrets.StatusSpec) bool { return true }).Wait(ctx)
}

func (o Options) skip() string {
	cfg, err := machine.Config(o.Store)
	if err != nil || cfg.Machine.Type.ControlPlane() {
		return ""
	}
	return "etcd runs on control planes only"
}

func (o Options) image() (string, error) {
	cfg, err := machine.Config(o.Store)
	if err != nil {
		return "", err
	}
	return cfg.Cluster.Etcd.Image, nil
}

// prepareData makes sure of the data directory.
func (o Options) prepareData() error {
	// etcd insists on 0700.
	if err := os.MkdirAll(boot.EtcdDataDir, 0o700); err != nil {
		return err
	}
	if err := os.Chmod(boot.EtcdDataDir, 0o700); err != nil {
		return err
	}
	cfg, err := machine.Config(o.Store)
	if err != nil {
		return err
	}
	return mayStart(cfg.Machine.Type, boot.EtcdDataDir)
}

// mayStart refuses to form a second cluster: only a node of type init starts one
// from nothing.
func mayStart(t config.MachineType, dataDir string) error {
	empty, err := isEmpty(dataDir)
	if err != nil {
		return err
	}
	if empty && t != config.Init {
		return fmt.Errorf("%s is empty and machine.type is %q: only a node of type %q forms a new cluster; set machine.type on exactly one node",
			dataDir, t, config.Init)
	}
	return nil
}

func isEmpty(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = f.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

func (o Options) spec(context.Context) ([]oci.SpecOpts, error) {
	cfg, err := machine.Config(o.Store)
	if err != nil {
		return nil, err
	}
	addr, err := network.Addresses.Get(o.Store, "default")
	if err != nil {
		return nil, err
	}
	name, err := network.Hostnames.Get(o.Store, "hostname")
	if err != nil {
		return nil, err
	}
	args := arguments(name.Spec, addr.Spec.Primary, cfg.Cluster.Etcd.ExtraArgs)
	return []oci.SpecOpts{
		oci.WithProcessArgs(args...),
		oci.WithHostNamespace(specs.NetworkNamespace),
		oci.WithCgroup("/system/etcd"),
		oci.WithRootFSReadonly(),
		oci.WithMounts([]specs.Mount{
			bind(boot.EtcdDataDir, "rw"),
			bind(secretsDir, "ro"),
		}),
	}, nil
}

func bind(path, access string) specs.Mount {
	return specs.Mount{Type: "bind", Source: path, Destination: path, Options: []string{"rbind", access, "nosuid", "nodev", "noexec"}}
}

// arguments is etcd's command line; extra arguments of the configuration win.
func arguments(name string, addr netip.Addr, extra map[string]string) []string {
	client := "https://" + netip.AddrPortFrom(addr, clientPort).String()
	peer := "https://" + netip.AddrPortFrom(addr, peerPort).String()
	flags := map[string]string{
		"name":                        name,
		"data-dir":                    boot.EtcdDataDir,
		"listen-client-urls":          fmt.Sprintf("https://127.0.0.1:%d,%s", clientPort, client),
		"advertise-client-urls":       client,
		"listen-peer-urls":            peer,
		"initial-advertise-peer-urls": peer,
		"initial-cluster":             name + "=" + peer,
		"initial-cluster-state":       "new",
		"listen-metrics-urls":         healthURL,
		"auto-compaction-mode":        "periodic",
		"auto-compaction-retention":   autoCompaction,
		"client-cert-auth":            "true",
		"peer-client-cert-auth":       "true",
		"trusted-ca-file":             secretsDir + "/ca.crt",
		"cert-file":                   secretsDir + "/server.crt",
		"key-file":                    secretsDir + "/server.key",
		"peer-trusted-ca-file":        secretsDir + "/ca.crt",
		"peer-cert-file":              secretsDir + "/peer.crt",
		"peer-key-file":               secretsDir + "/peer.key",
	}
	for k, v := range extra {
		flags[k] = v
	}
	args := make([]string, 0, len(flags))
	for k, v := range flags {
		args = append(args, "--"+k+"="+v)
	}
	sort.Strings(args)
	return slices.Insert(args, 0, "etcd")
}

// healthy asks the member itself, and tells the control plane what it said.
func (o Options) healthy(ctx context.Context) error {
	err := dag.HTTPCheck(healthURL + healthPath)(ctx)
	o.publish(err == nil)
	return err
}

func (o Options) publish(ready bool) {
	// The store refuses only a type that was never defined.
	_ = controlplane.EtcdStatuses.Put(o.Store.As(ID), "etcd", controlplane.EtcdStatus{
		Ready:    ready,
		Endpoint: fmt.Sprintf("https://127.0.0.1:%d", clientPort),
	})
}
