// Package boot is how a machine starts: the kernel command line, the table of the
// system disk, the two systems on it, and the paths on a node.
//
// It is the lowest package that both PID 1 and the services import. So it also
// has what all writers on a node need: the table of paths, and the atomic,
// synced file write.
package boot

// The paths on a node. The table in docs/design.md is this table.
const (
	StateDir      = "/system/state"             // STATE partition
	EFIDir        = "/system/boot"              // EFI system partition, while it is written
	ConfigFile    = "/system/state/config.yaml" // the applied configuration
	ExitFile      = "/system/state/last-exit"   // how and why the last boot that ended in order did; PID 1 writes it
	ClockFile     = "/system/state/clock"       // last saved time, the clock's floor
	SecretsDir    = "/system/secrets"           // tmpfs, 0700
	EphemeralDir  = "/var"                      // EPHEMERAL partition
	PstoreDir     = "/sys/fs/pstore"            // what the kernel stored when it died
	LogDir        = "/var/log"                  // logs of services, rotated
	RunDir        = "/run/garboard"             // of PID 1
	SignaturesDir = "/run/garboard/signatures"  // the PCR key and signatures of the running system
	PrivateDir    = "/system/run"               // tmpfs: of PID 1 and its sandboxes
	APIDir        = "/system/run/apid"          // apid's input: its certificate and the clients that it accepts
	TrustDir      = "/system/run/trustd"        // trustd's input: its certificate
	// OperationsDir is the directory of the operations' journals, on STATE.
	OperationsDir = "/system/state/operations"
	// MachineIDFile is the ID of the machine. /etc/machine-id is for other programs: pods could replace it.
	MachineIDFile = "/system/state/machine-id"
	EtcdDataDir   = "/var/lib/etcd"
	ContainerdDir = "/var/lib/containerd"
	KubeletDir    = "/var/lib/kubelet"
	// KubeletClient is the kubelet's client certificate with its key. The kubelet
	// itself writes and renews it.
	KubeletClient = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	StaticPodsDir = "/etc/kubernetes/manifests"
	// PodResolvConf is what pods get for their DNS while machine.network.resolver is on.
	PodResolvConf = "/etc/resolv.pods.conf"
	// CheckpointsDir has what pod-checkpointer keeps over a reboot, for a self-hosted control
	// plane; its subdirectory manifests has the static pods that were active.
	CheckpointsDir = "/var/lib/pod-checkpointer"
	// SelfHostedFile says over a reboot that the checkpoints count.
	SelfHostedFile = "/system/state/self-hosted"
	CRIConfDir     = "/var/cri/conf.d" // containerd drop-ins of the user
	CNIConfDir     = "/etc/cni/net.d"
	CNIBinDir      = "/opt/cni/bin" // on EPHEMERAL, over CNIPlugins
	CNIPlugins     = "/usr/lib/cni" // those of the image
	CABundle       = "/etc/ssl/certs/ca-certificates"
)

// SystemCgroup is the parent of the cgroups of etcd, the kubelet, the services in sandboxes
// and the extensions.
const SystemCgroup = "/system"

// GPT partition labels.
const (
	LabelEFI       = "EFI"
	LabelBIOS      = "BIOS"
	LabelMeta      = "META"
	LabelState     = "STATE"
	LabelEphemeral = "EPHEMERAL"
)

// ResetFile is on a container's STATE that was wiped: the node doesn't use its
// seed again. A machine has no such file after a reset: it looks for its
// configuration in all sources.
const ResetFile = "/system/state/reset"

// SeedConfigFile is where the container provisioner puts the configuration of a
// node that has none on STATE yet.
const SeedConfigFile = "/run/garboard-seed/config.yaml"

// Mode is the kind of machine that PID 1 runs on.
type Mode int

const (
	// Machine is bare metal or a VM: PID 1 owns kernel, disks and clock.
	Machine Mode = iota
	// Container is a node in namespaces of a host: PID 1 skips kernel modules,
	// disks and the clock.
	Container
)

func (m Mode) String() string {
	if m == Container {
		return "container"
	}
	return "machine"
}

// Power is what a machine does after everything has stopped.
type Power string

const (
	PowerOff Power = "power off"
	Reboot   Power = "reboot"
)
