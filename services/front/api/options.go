package api

import (
	"context"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/tpm"
)

// Options are what the API stands on: all that it can read or change.
type Options struct {
	Mode       boot.Mode
	Store      *resource.Store
	Graph      *dag.Graph
	Runtime    *resource.Runtime
	Logs       *logs.Logs
	Config     Applier
	Containerd *containerd.Containerd
	Etcd       *etcd.Etcd
	Operations *operation.Runner
	// Roster is what is known of the cluster's nodes, Enlist records one, and EnlistToken a token with which they join.
	Roster      func(ctx context.Context) (roster.Facts, error)
	EnlistToken func(ctx context.Context, id string, t roster.Token, forget bool) error
	Enlist      func(ctx context.Context, name string, r roster.Record) error
	// Interrupt calls do, which stops or restarts this node's etcd, if the cluster can do
	// without its member. force: also if not; the warning is why not.
	Interrupt func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// Reboot is Interrupt for what has the node reboot.
	Reboot func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// InterruptLocked is Interrupt for another node: its operation has the lock of the cluster.
	InterruptLocked func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// KubernetesVersion is the version of the cluster's components that don't have version
	// to.
	KubernetesVersion func(ctx context.Context, to string) (string, error)
	// Diagnose returns the problems of the node, and the checks that were made.
	Diagnose func(ctx context.Context) (findings []*apiv1.Finding, checked []string)
	// Since is the time since boot.
	Since func() time.Duration
	Disks func() ([]disk.Disk, error)
	// Recovery has the recovery keys of the system's disk.
	Recovery Recovery
	// SetTime sets the clock.
	SetTime func(context.Context, time.Time) error

	// Gate is where to listen.
	Gate *sandbox.Socket
	// PodLogs is where the kubelet keeps the logs of containers; "" is
	// defaultPodLogs.
	PodLogs string
	// Kmsg is the kernel's log; "" is defaultKmsg.
	Kmsg string
}

// Applier is the part of machine.Applier that the API needs.
type Applier interface {
	Apply(ctx context.Context, r configuration.Request) (configuration.Result, error)
	Confirm(ctx context.Context, by string) error
	Rollback(ctx context.Context, version uint64, r configuration.Request) (configuration.Result, error)
	History() ([]configuration.Entry, error)
	Text(version uint64) ([]byte, error)
	Situation() configuration.Situation
}

// Recovery is the part of disks.Disks that the API needs.
type Recovery interface {
	AddRecoveryKey(ctx context.Context, key string) error
	RecoveryKeys(ctx context.Context) ([]luks.RecoveryKey, error)
	RemoveRecoveryKey(ctx context.Context) error
	Unlock(ctx context.Context, key string) error
	Quote(nonce []byte) (q tpm.Quote, system []byte, err error)
}
