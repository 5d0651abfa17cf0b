// Package config is the machine configuration: one YAML document that says
// everything about a node. Load reads it strictly, reports every problem at
// once with its place, and fills the defaults in, so that nobody else in the
// system ever asks whether a field was set. Encode writes it back.
//
// The types below are the schema: each field has its YAML name in the tag, and
// its unit and default in the comment. A field whose zero value means something
// else than its default is a pointer. Zero values are never written. Entries of
// a list whose field has a key tag are told apart by that field of theirs: Diff
// compares, and a strategic merge patch merges, what has the same key.
package config

import (
	"net/netip"
	"time"
)

// Version is the only version of the document so far.
const Version = "v1alpha1"

// Config is the whole document.
type Config struct {
	Version string `yaml:"version"` // required
	// Persist says whether the document is kept on STATE, so that a change
	// made while running survives a reboot. Default true.
	Persist *bool   `yaml:"persist"`
	Machine Machine `yaml:"machine"`
	Cluster Cluster `yaml:"cluster"`
}

// MachineType is the part that a machine plays in its cluster.
type MachineType string

const (
	Init         MachineType = "init"         // a control plane that bootstraps the cluster at its first start; controlplane and gbctl bootstrap do the same, once
	ControlPlane MachineType = "controlplane" // etcd and the Kubernetes control plane
	Worker       MachineType = "worker"       // kubelet only; "join" is accepted as an alias
)

// ControlPlane reports whether etcd and the control plane run on the machine.
func (t MachineType) ControlPlane() bool { return t == Init || t == ControlPlane }

// Machine is what concerns this one node.
type Machine struct {
	Type MachineType `yaml:"type"` // required
	// Token lets a node ask trustd for certificates; as cluster.token:
	// six characters, a dot, sixteen characters of [a-z0-9]. Required.
	Token Secret `yaml:"token"`
	// CA signs the certificates of the machine API. Workers hold only crt.
	CA CertKey `yaml:"ca"`
	// CertSANs are further names and addresses in the API's certificate, on
	// control planes: they sign for workers what those can prove, which is the
	// address that they ask from.
	CertSANs   []string   `yaml:"certSANs"`
	Network    Network    `yaml:"network"`
	Time       Time       `yaml:"time"`
	Install    Install    `yaml:"install"`
	Kubelet    Kubelet    `yaml:"kubelet"`
	Registries Registries `yaml:"registries"`
	Files      []File     `yaml:"files" key:"path"`
	// Env is the environment of everything that fetches over the network on
	// the node, such as http_proxy, https_proxy, no_proxy.
	Env map[string]string `yaml:"env"`
	// Sysctls are kernel parameters by dotted name, such as vm.max_map_count. The ports of
	// the node's own servers stay in net.ipv4.ip_local_reserved_ports, beside those given.
	Sysctls              map[string]string    `yaml:"sysctls"`
	SystemDiskEncryption SystemDiskEncryption `yaml:"systemDiskEncryption"`
}

// Network is the node's own networking.
type Network struct {
	Hostname    string       `yaml:"hostname"`    // default: from DHCP, else made from a MAC address
	Nameservers []netip.Addr `yaml:"nameservers"` // default: from DHCP
	// Interfaces are the links of the node. Several entries for one interface
	// add up. An empty list means DHCP on every physical interface.
	Interfaces []Interface `yaml:"interfaces" key:"interface"`
}

// Interface is one entry for one link. Several entries may name one link.
type Interface struct {
	Name   string       `yaml:"interface"` // required, such as eth0, bond0 or wg0; lo0 is accepted for lo
	CIDR   netip.Prefix `yaml:"cidr"`      // an address with its prefix length
	MTU    int          `yaml:"mtu"`       // bytes; default: the kernel's
	DHCP   bool         `yaml:"dhcp"`      // DHCPv4
	Ignore bool         `yaml:"ignore"`    // leave the link alone
	Routes []Route      `yaml:"routes" key:"network"`

	Bond      *Bond      `yaml:"bond"`
	VLANs     []VLAN     `yaml:"vlans" key:"vlanId"`
	VIP       *VIP       `yaml:"vip"`
	WireGuard *WireGuard `yaml:"wireguard"`
}

// Route is a static route.
type Route struct {
	Network netip.Prefix `yaml:"network"` // required; 0.0.0.0/0 or ::/0 is the default route
	Gateway netip.Addr   `yaml:"gateway"` // without it the network is on the link
	Metric  uint32       `yaml:"metric"`  // the lower wins; default 1024
}

// Bond makes the interface a bond of links.
type Bond struct {
	Mode           string   `yaml:"mode"`           // kernel name, such as 802.3ad, active-backup; default balance-rr
	LACPRate       string   `yaml:"lacpRate"`       // slow (default) or fast
	XmitHashPolicy string   `yaml:"xmitHashPolicy"` // what spreads the traffic over the members; default layer2
	MIIMon         int      `yaml:"miimon"`         // ms between link checks; default 100, never 0: a dead link would go unnoticed
	UpDelay        int      `yaml:"updelay"`        // ms, a multiple of miimon
	DownDelay      int      `yaml:"downdelay"`      // ms, a multiple of miimon
	Interfaces     []string `yaml:"interfaces"`     // required; the members
}

// VLAN is a tagged link on top of the interface.
type VLAN struct {
	ID     int          `yaml:"vlanId"` // required, 1 to 4094
	CIDR   netip.Prefix `yaml:"cidr"`   // an address with its prefix length
	DHCP   bool         `yaml:"dhcp"`   // DHCPv4
	MTU    int          `yaml:"mtu"`    // bytes; default that of the interface
	Routes []Route      `yaml:"routes" key:"network"`
}

// VIP is the address that the control planes share. One of them has it at a time; it
// goes to another one when that is gone, or its API server is. They have to be on one
// link. There is none before bootstrap, which needs the address of a node.
type VIP struct {
	IP netip.Addr `yaml:"ip"` // required; in the subnet of the interface, used by nobody, outside of DHCP's pool
}

// WireGuard makes the interface a WireGuard one.
type WireGuard struct {
	PrivateKey Secret          `yaml:"privateKey"` // required, base64 of 32 bytes
	ListenPort int             `yaml:"listenPort"` // default: chosen by the kernel
	Peers      []WireGuardPeer `yaml:"peers" key:"publicKey"`
}

// WireGuardPeer is one peer.
type WireGuardPeer struct {
	PublicKey  string         `yaml:"publicKey"`  // required, base64 of 32 bytes
	Endpoint   string         `yaml:"endpoint"`   // host:port
	AllowedIPs []netip.Prefix `yaml:"allowedIPs"` // what the peer may send from, and is sent
	// PersistentKeepalive is the time between keepalives; default none.
	PersistentKeepalive time.Duration `yaml:"persistentKeepaliveInterval"`
}

// Time is where the time comes from.
type Time struct {
	Servers     []string      `yaml:"servers"`     // default: pool.ntp.org
	Disabled    bool          `yaml:"disabled"`    // trust the hardware clock
	BootTimeout time.Duration `yaml:"bootTimeout"` // how long boot waits for a first sync; default 30s, then it goes on unsynced
}

// Install is where the system lives.
type Install struct {
	Disk  string `yaml:"disk"`  // device, such as /dev/vda; required on machines, unused in containers
	Image string `yaml:"image"` // installer image; default: the release's own
	Wipe  bool   `yaml:"wipe"`  // take the disk even if it holds foreign data
}

// Kubelet is the kubelet.
type Kubelet struct {
	Image      string            `yaml:"image"`      // default DefaultKubeletImage
	ExtraArgs  map[string]string `yaml:"extraArgs"`  // flag without dashes: value
	NodeLabels map[string]string `yaml:"nodeLabels"` // a label that is taken out here is taken off the node
	// NodeTaints keep pods away, by key: an effect (NoSchedule, PreferNoSchedule
	// or NoExecute), or a value, a colon and an effect. A worker's are set when it
	// registers: Kubernetes lets no node change its own taints.
	NodeTaints map[string]Taint `yaml:"nodeTaints"`
	ClusterDNS []netip.Addr     `yaml:"clusterDNS"` // default: the tenth address of each service subnet
	NodeIP     NodeIP           `yaml:"nodeIP"`
	// ExtraMounts are directories of the node that the kubelet sees beside its
	// own, such as those of storage that pods mount from the node.
	ExtraMounts []Volume `yaml:"extraMounts" key:"mountPath"`
}

// NodeIP says which of the node's addresses is the one that the cluster uses.
type NodeIP struct {
	ValidSubnets []netip.Prefix `yaml:"validSubnets"` // default: any
}

// Registries is where images come from.
type Registries struct {
	// Mirrors by registry host, such as docker.io, or '*' for all others.
	Mirrors map[string]Mirror `yaml:"mirrors"`
	// Config by the host (and port) that is talked to, mirrors included.
	Config map[string]Registry `yaml:"config"`
}

// Mirror is asked instead of a registry, first endpoint first.
type Mirror struct {
	Endpoints []URL `yaml:"endpoints"` // required, http or https
}

// Registry is how to talk to a host that serves images.
type Registry struct {
	Auth *RegistryAuth `yaml:"auth"` // who the node is to the host
	TLS  *RegistryTLS  `yaml:"tls"`  // whom the node trusts besides the public authorities
}

// RegistryAuth identifies the node: username and password, or auth (base64 of
// both with a colon), or identityToken.
type RegistryAuth struct {
	Username      string `yaml:"username"`
	Password      Secret `yaml:"password"`
	Auth          Secret `yaml:"auth"`          // base64 of username, colon, password
	IdentityToken Secret `yaml:"identityToken"` // as a registry's login gave it
}

// RegistryTLS is how the node and one host know each other. Its authority counts
// beside the public ones.
type RegistryTLS struct {
	CA                 PEM     `yaml:"ca"`                 // authority of the host's certificate
	ClientIdentity     CertKey `yaml:"clientIdentity"`     // certificate of the node, for the host
	InsecureSkipVerify bool    `yaml:"insecureSkipVerify"` // trust whoever answers; for tests
}

// File is a file laid on the node, at boot and when it changes. What lies below
// /var/cri/conf.d and ends in .toml is merged into containerd's configuration; a
// change there restarts containerd.
type File struct {
	Content     string   `yaml:"content"`     // the text, or what is appended
	Permissions FileMode `yaml:"permissions"` // octal; default 0644
	Path        string   `yaml:"path"`        // required, below /etc, /run or /var
	Op          FileOp   `yaml:"op"`          // default create
}

// FileOp is what to do with the file.
type FileOp string

const (
	FileCreate    FileOp = "create"    // must not exist in the image
	FileAppend    FileOp = "append"    // to the image's own file, at each boot anew
	FileOverwrite FileOp = "overwrite" // replaces the image's own file
)

// SystemDiskEncryption says which partitions are encrypted.
type SystemDiskEncryption struct {
	State     *Encryption `yaml:"state"`     // the configuration, keys and journals
	Ephemeral *Encryption `yaml:"ephemeral"` // all else: images, pods, etcd, logs
}

// Encryption is the keys of one partition.
type Encryption struct {
	Keys []EncryptionKey `yaml:"keys" key:"slot"` // required, at least one
}

// EncryptionKey is exactly one of nodeID and static, in a slot.
type EncryptionKey struct {
	NodeID *EncryptionNodeID `yaml:"nodeID"` // {}: derived from the machine's UUID and the partition's label
	Static *EncryptionStatic `yaml:"static"` // a passphrase
	Slot   *int              `yaml:"slot"`   // required, 0 to 31; keySlot is a deprecated alias
}

// EncryptionNodeID derives the key from the machine's UUID and the label.
type EncryptionNodeID struct{}

// EncryptionStatic is a passphrase in the configuration.
type EncryptionStatic struct {
	Passphrase Secret `yaml:"passphrase"` // required
}
