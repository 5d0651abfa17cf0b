// Package network configures the node's links.
//
// It is the service `networkd`. One goroutine does all changes through netlink.
// Whenever the configuration, a lease or the kernel's state changes, and each
// minute, it computes the objects that the configuration and the leases want
// (addresses, routes, rules, MTUs), reads those that the kernel has, and applies
// the difference. What isn't ours stays; what another program removed comes back;
// what the kernel refuses is a problem of that object. A client for each link and source of leases runs
// in parallel and only sends it leases. It names the node, chooses the address
// that the cluster uses for it, and publishes addresses, host name, resolvers
// and time servers.
//
// A machine without a configuration must be reachable to get one: until then
// the service behaves as with an empty configuration.
//
//	configuration ───────────┐
//	leases ──────────────────┼─▶ wanted − actual ─▶ netlink, /etc, resources
//	kernel (netlink events) ─┘                          │
//	   ▲────────────────────────────────────────────────┘
//	   ▲
//	client: one for each link and source ─▶ protocol (DHCP)
package network

import (
	"context"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// ID of the service.
const ID = "networkd"

// kindOf defines a kind of the network.
func kindOf[T any](plural, kind string, columns ...resource.Column) *resource.Kind[T] {
	return resource.Define[T](resource.Definition{Type: plural + ".net.garboard.dev", Kind: kind, Namespace: "network", Columns: columns})
}

// NodeAddress is the address of the node that the cluster uses, and the reason
// of the choice.
type NodeAddress struct {
	Primary netip.Addr     `yaml:"primary" column:"PRIMARY"`
	All     []netip.Prefix `yaml:"all"` // in the order of the choice
	Why     string         `yaml:"why" column:"WHY"`
}

// Addresses has one object, "default": it exists once the node has an address.
var Addresses = kindOf[NodeAddress]("NodeAddresses", "NodeAddress")

// Hostnames has one object, "hostname".
var Hostnames = kindOf[string]("Hostnames", "Hostname", resource.Column{Name: "HOSTNAME", Value: func(s any) string { return s.(string) }})

// Resolvers has one object, "resolvers": the name servers, best first.
var Resolvers = kindOf[[]netip.Addr]("Resolvers", "Resolver", serversColumn)

// TimeServers has one object, "timeservers": those of the leases.
var TimeServers = kindOf[[]netip.Addr]("TimeServers", "TimeServer", serversColumn)

var serversColumn = resource.Column{Name: "SERVERS", Value: func(s any) string { return config.Joined(s.([]netip.Addr), ",") }}

// Status is the last result of networkd.
type Status struct {
	// Config is the version of the machine configuration that was applied; 0 while
	// there is none.
	Config   uint64   `yaml:"config" column:"CONFIG"`
	Problems []string `yaml:"problems,omitempty" column:"PROBLEMS"` // what the kernel refused; it is tried again
	// Addresses are those that the links have, also while networkd waits for others.
	Addresses []netip.Prefix `yaml:"addresses,omitempty"`
}

// Statuses has one object, "networkd".
var Statuses = kindOf[Status]("NetworkStatuses", "NetworkStatus")

// followTime is more than enough to apply a configuration: that is a few calls
// to the kernel.
const followTime = 30 * time.Second

// Await returns after the network's resources are those of the current
// configuration. It is for services that read them at their start, and may be
// restarted because they change.
func Await(ctx context.Context, s *resource.Store) error {
	o, err := configuration.Configs.Get(s, configuration.ConfigID)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	return Statuses.When(s, ID, "networkd to take the configuration over", func(n Status) bool { return n.Config >= o.Version }).Wait(ctx)
}

// IDs of the objects above.
const (
	AddressID     = "default"
	HostnameID    = "hostname"
	ResolversID   = "resolvers"
	TimeServersID = "timeservers"
)

// Options are the inputs of the service.
type Options struct {
	Store *resource.Store
	// Argument is the network of the kernel's argument, for a machine without a configuration.
	Argument config.Network
	// Platform reads the network-config of the platform, and calls needed when that needs the network. The error is
	// boot.ErrNone if it has none.
	Platform func(ctx context.Context, needed func()) ([]byte, error)

	etcDir   string                  // /etc; tests have their own
	pinFile  string                  // on STATE; different in tests
	pinReady func() bool             // whether STATE is mounted
	physical func(netlink.Link) bool // which links get DHCP without being listed
	card     func(netlink.Link) config.Card
	sources  []source // of leases; tests have more
	// The kernel's links and objects, and how these are changed; unit tests don't use the kernel.
	list   func() ([]netlink.Link, error)
	read   func() (actual, error)
	change func(o object, add bool) error
	// How virtual links are made: the kernel of a test may not have them.
	link func(v virtual, below int) netlink.Link
	// wireguard changes a WireGuard link, unless change is nil, and reads it.
	wireguard func(name string, change *wgtypes.Config) (*wgtypes.Device, error)
}

// Daemon is the service; its state belongs to the goroutine of run.
type Daemon struct {
	o Options
	// These are kept over a restart of the service. known are the objects that it has added,
	// and whether they were there at the last look.
	known  map[object]bool
	memory map[int]*memory    // by index of a link
	chosen map[string]int     // by selector: the index of its card
	made   map[string]virtual // the virtual links

	typed    chan config.Network // new ones
	without  config.Network      // settings while there is no configuration
	byHand   bool                // somebody at the console has made them
	platform platform
}

// memory is what networkd knows of a link besides what the kernel lists.
type memory struct {
	link       netlink.Link // at the last look
	name       string       // of that
	mtu        int          // before ours; 0: it has none of ours
	advertised advertised
	flags      uint32         // what routers say of DHCPv6
	ups        string         // how often it got a carrier, at the last look
	bond       *netlink.Bond  // with the options that the kernel had at first
	wireguard  wgtypes.Config // the last settings
	keyed      time.Time      // when it got them
	tuned      tuned
}

// of is what networkd knows of the link with that index.
func (d *Daemon) of(index int) *memory {
	if d.memory[index] == nil {
		d.memory[index] = &memory{advertised: advertised{}}
	}
	return d.memory[index]
}

// Use changes the settings of a machine without a configuration.
func (d *Daemon) Use(n config.Network) {
	select {
	case <-d.typed: // it isn't taken over yet
	default:
	}
	d.typed <- n
}

// New makes the service and doesn't start it.
func New(o Options) *Daemon {
	option.Default(&o.etcDir, "/etc")
	option.Default(&o.pinFile, filepath.Join(boot.StateDir, "node-address"))
	option.Default(&o.pinReady, func() bool { return boot.IsMountPoint(filepath.Dir(o.pinFile)) })
	option.Default(&o.physical, physicalEthernet)
	option.Default(&o.card, cardOf)
	option.Default(&o.sources, sources)
	option.Default(&o.list, func() ([]netlink.Link, error) { return dump("links", netlink.LinkList) })
	option.Default(&o.read, readKernel)
	option.Default(&o.change, object.change)
	option.Default(&o.link, virtual.link)
	option.Default(&o.wireguard, wireguard)
	return &Daemon{
		o: o, known: map[object]bool{}, memory: map[int]*memory{}, chosen: map[string]int{}, made: map[string]virtual{},
		typed: make(chan config.Network, 1),
	}
}

// Service is networkd in the graph. It is up after the links of the
// configuration have their addresses. It doesn't depend on machined, which is up
// only with a configuration, but waits until machined has looked for one where this needs no
// network: DHCP on a link that must not be configured would be wrong even for a short time.
func (d *Daemon) Service() dag.Service {
	return dag.Service{
		ID: ID,
		Needs: []dag.Condition{
			configuration.Stages.When(d.o.Store, configuration.StageID, "the search for a configuration to end", nil),
		},
		Run:     d.run,
		Restart: dag.RestartAlways,
	}
}
