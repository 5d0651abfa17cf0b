// Package boot is how a machine starts: what the kernel command line says,
// where the configuration comes from, and where things are on a node.
//
// It is the lowest room that both PID 1 and the services stand on, so it also
// owns the two ideas that every writer on a node needs: the table of paths and
// the atomic, synced file write.
package boot

// Where things are on a node. The table in docs/design.md is this table.
const (
	StateDir     = "/system/state"             // STATE partition
	ConfigFile   = "/system/state/config.yaml" // the applied configuration
	ClockFile    = "/system/state/clock"       // last saved time, the clock's floor
	SecretsDir   = "/system/secrets"           // tmpfs, 0700
	EphemeralDir = "/var"                      // EPHEMERAL partition
	LogDir       = "/var/log"                  // logs of services, rotated
	RunDir       = "/run/garboard"             // sockets
	// MachineSocket is the machine API, without its gate: in a directory of its own,
	// which is what the gate's sandbox is shown. A socket that is made anew would
	// not be there otherwise.
	MachineSocket = "/run/garboard/machine/machine.sock"
	APIDir        = "/run/garboard/apid"   // what apid knows: its certificate and who may come in
	TrustDir      = "/run/garboard/trustd" // what trustd knows: the authority of the machine API
	// OperationsDir is where the journals of operations are, on STATE.
	OperationsDir = "/system/state/operations"
	EtcdDataDir   = "/var/lib/etcd"
	ContainerdDir = "/var/lib/containerd"
	KubeletDir    = "/var/lib/kubelet"
	// KubeletClient is the kubelet's certificate as a client, with its key. The kubelet
	// itself keeps it, and renews it.
	KubeletClient = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	StaticPodsDir = "/etc/kubernetes/manifests"
	CRIConfDir    = "/var/cri/conf.d" // containerd drop-ins of the user
	CNIConfDir    = "/etc/cni/net.d"
	CNIBinDir     = "/opt/cni/bin"
	CABundle      = "/etc/ssl/certs/ca-certificates"
)

// GPT partition labels.
const (
	LabelEFI       = "EFI"
	LabelBootA     = "BOOT-A"
	LabelBootB     = "BOOT-B"
	LabelMeta      = "META"
	LabelState     = "STATE"
	LabelEphemeral = "EPHEMERAL"
)

// ResetFile is on a container's STATE that was wiped: its seed isn't taken again. A
// machine forgets that it was reset; its configuration comes from where it looks for
// one.
const ResetFile = "/system/state/reset"

// SeedConfigFile is where the container provisioner puts the configuration of
// a node that has none on STATE yet.
const SeedConfigFile = "/run/garboard-seed/config.yaml"

// Mode says what kind of machine PID 1 runs on.
type Mode int

const (
	// Machine is bare metal or a VM: PID 1 owns kernel, disks and clock.
	Machine Mode = iota
	// Container is a node in namespaces of a host: PID 1 skips kernel modules,
	// disks and clock setting.
	Container
)

func (m Mode) String() string {
	if m == Container {
		return "container"
	}
	return "machine"
}

// Power is what a machine does when all has stopped.
type Power string

const (
	PowerOff Power = "power off"
	Reboot   Power = "reboot"
)
