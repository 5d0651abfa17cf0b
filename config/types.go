// Package config is the machine configuration: one YAML document that describes a node
// completely. Load parses it strictly, reports all problems together with their
// positions, and fills in the defaults, so that other packages never check whether a
// field is set. Encode writes it.
//
// The types below are the schema: the tag of a field has its YAML name, and the comment
// has its unit and default. A field is a pointer if its zero value differs from its
// default. Zero values are not written. The key tag of a list names the field that
// identifies an entry, or several, of which the first one counts that both entries have:
// Diff compares, and a strategic merge patch merges, entries with the same key, unless they
// differ in the field that the apart tag names.
package config

import (
	"net/netip"
	"time"
)

// Version is the only version of the document.
const Version = "v1alpha1"

// Config is the whole document.
type Config struct {
	Version string `yaml:"version"` // required
	// Persist keeps the document on STATE, so that a change survives a reboot. Default true. With false, STATE and the
	// history have no document, and each boot reads it from where the first boot found it.
	Persist *bool   `yaml:"persist"`
	Machine Machine `yaml:"machine"`
	Cluster Cluster `yaml:"cluster"`
}

// MachineType is the role of a machine in its cluster.
type MachineType string

const (
	Init         MachineType = "init"         // a control plane that begins the cluster at its first start
	ControlPlane MachineType = "controlplane" // etcd and the Kubernetes control plane
	Worker       MachineType = "worker"       // kubelet only; "join" is accepted as an alias
)

// ControlPlane reports whether etcd and the control plane run on the machine.
func (t MachineType) ControlPlane() bool { return t == Init || t == ControlPlane }

// SelfHosted reports whether the configuration has the format of the releases before static
// pods, which ran the control plane as pods of the cluster itself.
func (c *Config) SelfHosted() bool {
	return c.Machine.Type.ControlPlane() && len(c.Cluster.Etcd.CA.Crt) > 0 &&
		len(c.Cluster.ServiceAccount.Key) == 0 && len(c.Cluster.AggregatorCA.Crt) == 0 && len(c.Cluster.AggregatorCA.Key) == 0
}

// Machine has the settings of this node.
type Machine struct {
	Type MachineType `yaml:"type"` // required
	// Token authorises a node to get certificates from trustd; the form is that of cluster.token:
	// six characters, a dot, sixteen characters of [a-z0-9]. Required.
	Token Secret `yaml:"token"`
	// CA signs the certificates of the machine API. Workers hold only crt.
	CA CertKey `yaml:"ca"`
	// AcceptedCAs are further authorities of the machine API: their certificates are accepted,
	// and only ca signs new ones. A change of ca needs no reboot if the new one was accepted
	// before, and the old one still is. gbctl rotate-ca keeps the keys of both here while it
	// runs.
	AcceptedCAs []CertKey `yaml:"acceptedCAs" key:"crt"`
	// CertSANs are additional names and addresses in the certificate of the machine API,
	// on control planes only: for a worker, control planes sign only the address of its
	// connection.
	CertSANs []string `yaml:"certSANs"`
	Network  Network  `yaml:"network"`
	Time     Time     `yaml:"time"`
	Install  Install  `yaml:"install"`
	// Disks are for the data of pods, besides the system's disk. They keep it in resets and upgrades.
	Disks      []DataDisk `yaml:"disks" key:"name"`
	Kubelet    Kubelet    `yaml:"kubelet"`
	Registries Registries `yaml:"registries"`
	Images     Images     `yaml:"images"`
	Files      []File     `yaml:"files" key:"path"`
	// Env is the environment of all programs that download over the network, such as
	// http_proxy, https_proxy, no_proxy. Only administrators see the values of others than
	// these, and of all_proxy.
	Env Env `yaml:"env"`
	// Sysctls are kernel parameters by dotted name, such as vm.max_map_count. With slashes, a dot belongs to a part of
	// the name, such as that of a VLAN's link: net/ipv6/conf/eth0.103/disable_ipv6. The ports
	// of the node's own servers are always added to net.ipv4.ip_local_reserved_ports. If a
	// parameter differs from what the kubelet demands, such as kernel.panic, the kubelet
	// doesn't check those parameters any more.
	Sysctls map[string]string `yaml:"sysctls"`
	// Sysfs are settings of devices and of the kernel by their path below /sys, such as
	// block/sda/queue/scheduler. One that isn't there yet is set as soon as a device brings it.
	Sysfs                map[string]string    `yaml:"sysfs"`
	Udev                 Udev                 `yaml:"udev"`
	Kernel               Kernel               `yaml:"kernel"`
	SystemDiskEncryption SystemDiskEncryption `yaml:"systemDiskEncryption"`
	Logging              Logging              `yaml:"logging"`
	Metrics              Metrics              `yaml:"metrics"`
	Console              Console              `yaml:"console"`
}

// Udev has rules for devices.
type Udev struct {
	// Rules are those of udev(7), each in one text. The conditions are ACTION, KERNEL, SUBSYSTEM, DRIVER, ENV{…},
	// ATTR{…}, and KERNELS, SUBSYSTEMS, DRIVERS and ATTRS{…} for the device or one of its parents. ATTR{…}=, MODE=,
	// OWNER= and GROUP= (numbers) and SYMLINK+= act on the device; %k is its name. Containers have no devices.
	Rules []string `yaml:"rules"`
}

// Kernel has settings of the kernel.
type Kernel struct {
	// Modules are loaded besides those of the machine's devices, in their order.
	Modules []KernelModule `yaml:"modules" key:"name"`
}

// KernelModule is a module of the kernel that no device asks for. It must be in the system: docs/customization.md
// explains how to add one.
type KernelModule struct {
	Name string `yaml:"name"` // required, such as nvme_tcp
	// Parameters are those of the module, such as nr_disks=4. A module that is loaded already keeps its own: parameters
	// of modules for devices are kernel arguments, MODULE.PARAMETER=VALUE, in machine.install.extraKernelArgs.
	Parameters []string `yaml:"parameters"`
}

// Console is the machine's own screen with its keyboard, and its serial lines: they take commands without credentials.
type Console struct {
	// refused commands: status, log, network, unlock, wipe, reboot, shutdown
	Disabled []ConsoleCommand `yaml:"disabled"`
}

// ConsoleCommand is one of the commands of package console.
type ConsoleCommand string

// Network has the network settings of the node.
type Network struct {
	Hostname string `yaml:"hostname"` // default: see autoHostname
	// AutoHostname is where the name comes from if hostname has none: auto (default) takes the first valid name of a
	// lease, else makes one from a MAC address; stable makes it from the MAC address always; off makes none, so that
	// hostname is required. A name is kept over reboots.
	AutoHostname AutoHostname `yaml:"autoHostname"`
	Nameservers  []netip.Addr `yaml:"nameservers"` // default: from DHCP and router advertisements; at most three
	// SearchDomains complete short names. Default: from DHCP and router advertisements.
	SearchDomains    []string    `yaml:"searchDomains"`
	ExtraHostEntries []HostEntry `yaml:"extraHostEntries" key:"ip"` // further lines of /etc/hosts
	// Interfaces are the links of the node. Several entries for one interface are
	// combined. An empty list means DHCP on every physical interface.
	Interfaces []Interface `yaml:"interfaces" key:"interface,hardwareAddr,driver,busPath"`
	Rules      []Rule      `yaml:"rules" key:"priority"`
	Firewall   Firewall    `yaml:"firewall"`
	Resolver   Resolver    `yaml:"resolver"`
}

// AutoHostname is a way to name a node.
type AutoHostname string

// Ways to name a node.
const (
	HostnameAuto   AutoHostname = "auto"
	HostnameStable AutoHostname = "stable"
	HostnameOff    AutoHostname = "off"
)

// HostEntry is a line of /etc/hosts.
type HostEntry struct {
	IP      netip.Addr `yaml:"ip"`      // required
	Aliases []string   `yaml:"aliases"` // required; the names of the address
}

// Interface is an entry for a link. Several entries may name the same link.
type Interface struct {
	// Name is the kernel's, such as eth0, bond0 or wg0. With hardwareAddr, driver or busPath it is an alias for the
	// card that these select, and may be left out. lo0 is accepted for lo.
	Name string `yaml:"interface"`
	// the card with this MAC address, the permanent one if it has one; * is any text
	HardwareAddr string       `yaml:"hardwareAddr"`
	Driver       string       `yaml:"driver"`  // the only card with this driver, such as virtio_net; * is any text
	BusPath      string       `yaml:"busPath"` // the only card at this place, such as 0000:00:04.0; * is any text
	CIDR         netip.Prefix `yaml:"cidr"`    // an address with its prefix length
	MTU          int          `yaml:"mtu"`     // bytes; default: the kernel's
	DHCP         bool         `yaml:"dhcp"`    // DHCPv4; cards without an entry have it
	DHCP6        bool         `yaml:"dhcp6"`   // DHCPv6, with an address; without, a router advertisement decides
	// AcceptRA takes addresses, routes, name servers and search domains of router advertisements: auto (default) takes
	// them on all links but members of a bond or bridge; true also says that the link has its addresses by them; false
	// takes nothing.
	AcceptRA Advertisements `yaml:"acceptRA"`
	// DHCPOptions are for dhcp.
	DHCPOptions DHCPOptions `yaml:"dhcpOptions"`
	// Required makes the node wait for this link for up to two minutes at its start. Default: the link with the node's
	// address.
	Required bool    `yaml:"required"`
	Ignore   bool    `yaml:"ignore"` // don't configure the link
	Routes   []Route `yaml:"routes" key:"network" apart:"table"`

	// The node makes a link of one of these kinds.
	Bond      *Bond      `yaml:"bond"`
	Bridge    *Bridge    `yaml:"bridge"`
	VRF       *VRF       `yaml:"vrf"`
	MACVLAN   *MACVLAN   `yaml:"macvlan"`
	Veth      *Veth      `yaml:"veth"`
	Dummy     bool       `yaml:"dummy"` // a link without a wire, for addresses of services
	WireGuard *WireGuard `yaml:"wireguard"`

	Ethernet *Ethernet `yaml:"ethernet"` // settings of the card's driver

	VLANs []VLAN `yaml:"vlans" key:"vlanId"` // links on top of this one, whatever its kind
	VIP   *VIP   `yaml:"vip"`
}

// Advertisements is whether a link takes router advertisements.
type Advertisements string

// What a link can do with them.
const (
	AdvertisementsAuto Advertisements = "auto"
	AdvertisementsOn   Advertisements = "true"
	AdvertisementsOff  Advertisements = "false"
)

// DHCPOptions are for a DHCP client.
type DHCPOptions struct {
	// of the lease's routes; default 1024, and one more for each link before
	RouteMetric uint32 `yaml:"routeMetric"`
	// of the routes of the lease, for rules; default that of the VRF, or 254, the main one
	RouteTable uint32 `yaml:"routeTable"`
	// option 61, a text; default: none, so that servers know the node by its MAC address
	ClientIdentifier string `yaml:"clientIdentifier"`
	UserClass        string `yaml:"userClass"` // option 77, one text, for the choices of servers; default: none
	// VendorClassIdentifier is option 60, a text; default garboard. This and the other texts have 254 bytes at most.
	VendorClassIdentifier string `yaml:"vendorClassIdentifier"`
}

// Route is a static route.
type Route struct {
	Network netip.Prefix `yaml:"network"` // required; 0.0.0.0/0 or ::/0 is the default route
	Gateway netip.Addr   `yaml:"gateway"` // without it, the network is directly on the link
	Metric  uint32       `yaml:"metric"`  // the lowest is preferred; default 1024
	Source  netip.Addr   `yaml:"source"`  // where packets over this route are sent from; default: the kernel's choice
	MTU     int          `yaml:"mtu"`     // bytes; default: that of the interface
	// 1 to 4294967295; default 254, the main one (0 is the main one, too); rules choose others
	Table uint32    `yaml:"table"`
	Type  RouteType `yaml:"type"` // unicast (default); or without a gateway, blackhole, unreachable or prohibit
}

// RouteType is what happens to a packet.
type RouteType string

// What can happen to a packet.
const (
	RouteUnicast     RouteType = "unicast"
	RouteBlackhole   RouteType = "blackhole"   // it is dropped
	RouteUnreachable RouteType = "unreachable" // its sender is told that the host is unreachable
	RouteProhibit    RouteType = "prohibit"    // its sender is told that this is forbidden
)

// Rule chooses a table of routes (ip-rule(8)).
type Rule struct {
	Priority uint32       `yaml:"priority"` // required; 1 to 32765: the lowest is first, and no two rules have the same
	From     netip.Prefix `yaml:"from"`     // packets from these addresses
	To       netip.Prefix `yaml:"to"`       // packets to these addresses
	FwMark   uint32       `yaml:"fwMark"`   // packets with this mark
	Table    uint32       `yaml:"table"`    // required
}

// VIP is a virtual address that the control planes share. One of them has it at a time;
// another one takes it over if that one or its API server fails. All of them must be on
// the same link. The address is not available before bootstrap: use the address of a node
// for that.
type VIP struct {
	IP netip.Addr `yaml:"ip"` // required; in the subnet of the interface, unused, and outside of the DHCP pool
}

// WireGuard makes the interface a WireGuard interface.
type WireGuard struct {
	PrivateKey Secret `yaml:"privateKey"` // required, base64 of 32 bytes
	ListenPort int    `yaml:"listenPort"` // default: chosen by the kernel
	// FirewallMark marks the encrypted packets that the interface sends: a rule with this fwMark chooses their table.
	// Default none.
	FirewallMark uint32          `yaml:"firewallMark"`
	Peers        []WireGuardPeer `yaml:"peers" key:"publicKey"`
}

// WireGuardPeer is a peer.
type WireGuardPeer struct {
	PublicKey string `yaml:"publicKey"` // required, base64 of 32 bytes
	// base64 of 32 bytes; a second key that only this node and this peer have; default none
	PresharedKey Secret `yaml:"presharedKey"`
	Endpoint     string `yaml:"endpoint"` // host:port
	// source addresses that the peer may use, and destinations sent to it
	AllowedIPs []netip.Prefix `yaml:"allowedIPs"`
	// PersistentKeepalive is the interval of keepalive packets; default none.
	PersistentKeepalive time.Duration `yaml:"persistentKeepaliveInterval"`
}

// Time has the settings of time synchronisation.
type Time struct {
	// default: those of DHCP, or pool.ntp.org; two that agree may set the clock to any date, one by a day at most
	Servers     []string      `yaml:"servers"`
	Disabled    bool          `yaml:"disabled"`    // use only the hardware clock
	BootTimeout time.Duration `yaml:"bootTimeout"` // how long the boot waits for the first time; default 30s
}

// Install has the settings of the installation.
type Install struct {
	Disk string `yaml:"disk"` // device, such as /dev/vda; machines need it or diskSelector, and containers don't use it
	// DiskSelector chooses a disk that has all of these properties, the first one by name if there are several. If disk
	// is set, this disk must have them. Names such as /dev/sda can change with each boot. `gbctl disks -o yaml` shows
	// the properties.
	DiskSelector DiskSelector `yaml:"diskSelector"`
	// Image is the installer image that a machine without a system on its disk is installed from, once it has its
	// configuration and containerd runs. Default: the medium that the machine was booted from; one that was booted over
	// the network isn't installed.
	Image string `yaml:"image"`
	// Wipe uses the disk even if it contains other data. A diskSelector with the serial number, without an asterisk,
	// does the same.
	Wipe bool `yaml:"wipe"`
	// ExtraKernelArgs are added to the kernel's command line of an installed system. They change at the next
	// installation or upgrade.
	ExtraKernelArgs []string `yaml:"extraKernelArgs"`
	// Keys are public keys of whoever makes systems for this machine, each the line between BEGIN and END in a file of
	// `gbctl gen release-key`. The running system has the key of its own maker, too.
	Keys []string `yaml:"keys"`
	// Unsigned installs and runs systems that nobody has signed, or that were changed after that.
	Unsigned bool `yaml:"unsigned"`
}

// DiskSelector has properties of a disk. In all but size and type, an asterisk stands for any characters.
type DiskSelector struct {
	Size    DiskSize `yaml:"size"`    // a comparison (>=, <=, >, < or ==) and a size, such as ">= 100GB" or "<= 2TiB"
	Model   string   `yaml:"model"`   // such as "Samsung*"
	Serial  string   `yaml:"serial"`  // serial number
	WWID    string   `yaml:"wwid"`    // world wide identifier, such as naa.5002538d40000000
	BusPath string   `yaml:"busPath"` // below /sys/devices, such as "/pci0000:00/0000:00:1f.2/*"
	Type    DiskType `yaml:"type"`    // an ssd is a disk without rotating parts that isn't nvme
}

// NamesSerial reports whether the selector has the whole serial number of a disk.
func (s DiskSelector) NamesSerial() bool { return exact(s.Serial) }

// DataDisk is a disk for the data of pods. One that is empty gets its partitions and file systems from the node. The
// kubelet starts when all of them are mounted.
type DataDisk struct {
	Name string `yaml:"name"` // required; for messages and patches
	// Device is the disk, such as /dev/sdb, or a link in /dev/disk/by-id. A disk that has the partitions already is
	// found under any name.
	Device       string       `yaml:"device"`
	DiskSelector DiskSelector `yaml:"diskSelector"` // as in machine.install; required without device
	Wipe         bool         `yaml:"wipe"`         // use the disk even if it contains other data, which is lost then
	// Partitions are in their order on the disk. Further ones can be added while there is room for them. One that isn't
	// here any more keeps its data, and isn't mounted after the next boot.
	Partitions []DataPartition `yaml:"partitions" key:"mountpoint"` // required, at least one
}

// DataPartition is a partition with a file system.
type DataPartition struct {
	// Mountpoint is /var/mnt/NAME: required; NAME has at most 32 of the characters a-z, 0-9 and -.
	Mountpoint string `yaml:"mountpoint"`
	// Size is such as 100GB or 2TiB; at least 320MiB. The last partition may be without: it has the rest of the disk,
	// and grows with it.
	Size       ByteSize   `yaml:"size"`
	FileSystem FileSystem `yaml:"filesystem"` // default xfs; one that exists stays
	// Encryption encrypts the partition with LUKS2 when it is made. One with content stays as it is until its disk is
	// wiped. No effect in containers.
	Encryption *Encryption `yaml:"encryption"`
}

// Kubelet has the settings of the kubelet.
type Kubelet struct {
	Image string `yaml:"image"` // default DefaultKubeletImage
	// ExtraArgs are flags without dashes. They replace the settings of the node, such as
	// pod-max-pids (4096 processes and threads for each pod) and seccomp-default (true).
	ExtraArgs  Args              `yaml:"extraArgs"`
	NodeLabels map[string]string `yaml:"nodeLabels"` // a label that is removed here is removed from the node
	// NodeTaints are taints by key: an effect (NoSchedule, PreferNoSchedule or
	// NoExecute), or a value, a colon and an effect. One that is removed here is removed from
	// the node. Control planes change those of a worker, within a minute.
	NodeTaints map[string]Taint `yaml:"nodeTaints"`
	ClusterDNS []netip.Addr     `yaml:"clusterDNS"` // default: the tenth address of each service subnet
	NodeIP     NodeIP           `yaml:"nodeIP"`
	// ExtraMounts are additional directories of the node in the kubelet's container, for
	// example for storage that pods mount from the node.
	ExtraMounts []Volume `yaml:"extraMounts" key:"mountPath"`
	// Persist is what pods leave that stays over a boot, and is emptied otherwise: CNI plugins with their networks
	// (cni), and FlexVolume drivers (volumePlugins). The node runs them as root.
	Persist []string `yaml:"persist"`
}

// NodeIP selects the address of the node that the cluster uses.
type NodeIP struct {
	ValidSubnets []netip.Prefix `yaml:"validSubnets"` // default: any
}

// Registries has the settings of image registries.
type Registries struct {
	// Mirrors are mirrors by registry host, such as docker.io, or '*' for all other hosts.
	Mirrors map[string]Mirror `yaml:"mirrors"`
	// Config has settings by the host (and port) of the server, also for mirrors. '*' has the tls of hosts without
	// their own.
	Config map[string]Registry `yaml:"config"`
}

// Mirror is asked before a registry. The endpoints are tried in their order, and the registry
// itself when none of them has an image.
type Mirror struct {
	// required, http or https; /v2 is appended to a path that neither begins nor ends with it
	Endpoints    []URL `yaml:"endpoints"`
	OverridePath bool  `yaml:"overridePath"` // the paths of the endpoints are used as they are
	SkipFallback bool  `yaml:"skipFallback"` // the registry itself is never asked
}

// Registry has the settings of a host that serves images.
type Registry struct {
	Auth *RegistryAuth `yaml:"auth"` // credentials of the node; not for '*'
	TLS  *RegistryTLS  `yaml:"tls"`  // authorities and certificates
}

// RegistryAuth has the credentials of the node: username and password, or auth (base64 of
// both with a colon), or identityToken.
type RegistryAuth struct {
	Username      string `yaml:"username"`
	Password      Secret `yaml:"password"`
	Auth          Secret `yaml:"auth"`          // base64 of username, colon, password
	IdentityToken Secret `yaml:"identityToken"` // as returned by the login of the registry
}

// RegistryTLS has the TLS settings for one host. The authority is trusted in addition to
// the public ones.
type RegistryTLS struct {
	CA                 PEM     `yaml:"ca"`                 // authority of the certificate of the host
	ClientIdentity     CertKey `yaml:"clientIdentity"`     // client certificate of the node
	InsecureSkipVerify bool    `yaml:"insecureSkipVerify"` // don't verify the certificate of the host; for tests
}

// Images says which images the node accepts.
type Images struct {
	// Verify has rules for the images that the node itself pulls: the installer image, those of etcd and
	// the kubelet, those that gbctl upgrade-k8s fetches, and another image for a program of the control plane that
	// runs; also for images on a medium. Images of pods are
	// verified if the rule has pods: true.
	// An image is accepted if no rule is for it, or if it is signed as the rule with the longest prefix says.
	// Images that the node has already aren't verified again.
	Verify []ImageRule `yaml:"verify" key:"prefix"`
}

// ImageRule says how images are signed. Signatures are those of cosign, in the same repository.
type ImageRule struct {
	// Prefix is the beginning of the images' names, with their registry, such as ghcr.io/garboard-os/, or '*' for all
	// images without another rule. The registry's port 443 counts as no port.
	Prefix string `yaml:"prefix"`
	// Pods says whether the rule is also for images of pods, with those of Kubernetes' control plane. Default false.
	Pods bool  `yaml:"pods"`
	Keys []PEM `yaml:"keys"` // public keys: a signature of one of them is enough
	// Authority signs the certificates of those who sign images. A certificate must be valid when an image
	// is verified.
	Authority PEM `yaml:"authority"`
	// Identity is the e-mail address, or the URI, in such a certificate. Required with authority.
	Identity string `yaml:"identity"`
}

// File is a file that is written to the node, at boot and when it changes. Files below
// /var/cri/conf.d with the suffix .toml are merged into the configuration of containerd;
// a change of them restarts containerd.
type File struct {
	Content     string   `yaml:"content"`     // the text to write or append
	Permissions FileMode `yaml:"permissions"` // octal; default 0644
	Path        string   `yaml:"path"`        // required, below /etc, /run or /var
	Op          FileOp   `yaml:"op"`          // default create
	// Public lets all who may read the machine API see the content in the configuration, in
	// differences and in support bundles. By default only administrators do.
	Public bool `yaml:"public"`
}

// Env are variables of the environment, by name.
type Env map[string]string

// FileOp is how the file is written.
type FileOp string

const (
	FileCreate    FileOp = "create"    // the file must not exist in the image
	FileAppend    FileOp = "append"    // append to the file of the image, again at each boot
	FileOverwrite FileOp = "overwrite" // replace the file of the image
)
