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
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/socket"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
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

// Servers are the objects of both, and the search domains, each with who wants it.
var Servers = kindOf[Object]("Servers", "Server")

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

// retryEvery is how often unfinished work is retried: a link that the kernel
// refused, a node address to store, a link that others depend on.
const retryEvery = time.Second

// owner is one run of the service. Only one goroutine uses it.
type owner struct {
	*Daemon
	h   *dag.Handle
	log *slog.Logger

	cfg        *config.Config // an empty one in maintenance mode
	settings   config.Network // with what only lower layers have
	version    uint64         // of cfg
	configured bool           // there is a configuration
	plans      []config.Link
	virtuals   []virtual
	members    map[string]string       // of bonds and bridges: the master's name
	aliases    map[string]string       // by name of a link: its name in the configuration, if that is another
	links      map[string]netlink.Link // at the last look
	clients    map[leaseKey]*client
	due        time.Time        // when there is something to do without an event
	spent      int              // how many changes of others were taken over since the last calm tick
	errs       map[string]error // by link: what the kernel refused
	tunnels    map[string]WireGuardStatus
	logged     []string // problems
	wanted     []want
	state      actual // at the last look
	attempts   map[object]*attempt
	watches    map[address]watch // the searches for other hosts with our addresses
	held       map[object]bool   // addresses that other hosts know to be ours
	declined   map[leaseKey]declined
	named      map[string]lookup // by name of a WireGuard peer
	lookups    sync.WaitGroup
	lldp       *socket.Conn // nil: the kernel has no such sockets
	// what goroutines of this one have heard; they report whether that changes what is wanted
	heard    chan func() bool
	switches map[int]map[string]LinkNeighbor // by index of a card that has joined, and chassis

	firstAddr   time.Time    // when the node first had an address
	waiting     string       // the last reported reason to wait
	since       time.Time    // since when
	linkWarned  bool         // a missing link was logged at the console
	settled     bool         // everything was there once
	toldServers []netip.Addr // too many name servers that were logged
	hostname    string       // from an earlier boot, a lease or a MAC address: not changed once chosen
	pinned      netip.Addr
	savedName   string // on STATE
	savedAddr   netip.Addr
	cards       map[string]string // by selector: the permanent address of the card that an entry has once selected
	savedCards  map[string]string
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	o := &owner{
		Daemon:   d,
		h:        h,
		log:      h.Log,
		clients:  map[leaseKey]*client{},
		attempts: map[object]*attempt{},
		watches:  map[address]watch{},
		held:     maps.Clone(d.known), // over a restart of the service
		declined: map[leaseKey]declined{},
		named:    map[string]lookup{},
		heard:    make(chan func() bool),
		switches: map[int]map[string]LinkNeighbor{},
		cards:    map[string]string{},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer o.lookups.Wait()
	defer o.stopClients()
	defer cancel()
	configs := d.o.Store.Watch(ctx, configuration.Configs.Type())
	o.askPlatform(ctx)
	select {
	case o.without = <-o.typed: // before the start
		o.byHand = true
	default:
	}
	if _, err := o.configure(); err != nil {
		return err
	}
	if err := o.hearLLDP(ctx); err != nil {
		o.log.Warn("the neighbours of links stay unknown: " + err.Error())
	}
	if err := o.listen(ctx); err != nil {
		return err
	}
	return o.loop(ctx, configs)
}

// configure applies the configuration; without one, an empty one. It reports whether that changes what is wanted.
func (o *owner) configure() (changed bool, err error) {
	cfg, err := configuration.Configs.Get(o.o.Store, configuration.ConfigID)
	if err != nil && !errors.Is(err, resource.ErrNotFound) {
		return false, err
	}
	old := o.cfg
	if o.cfg = (&config.Config{Machine: config.Machine{Network: o.without}}); err == nil {
		o.cfg, o.version = cfg.Spec, cfg.Version
	}
	if err != nil || o.configured {
		return old == nil || !reflect.DeepEqual(old.Machine.Network, o.cfg.Machine.Network) ||
			!reflect.DeepEqual(old.Machine.Kubelet.NodeIP, o.cfg.Machine.Kubelet.NodeIP), nil
	}
	o.configured = true
	o.recall()
	if !o.settled {
		return true, nil
	}
	// The node's name and address are chosen by the settings of the first configuration, and aren't published before
	// they are applied.
	o.log.Info("the configuration has come: going on with it")
	o.settled, o.firstAddr = false, time.Time{}
	w := o.o.Store.As(ID)
	return true, errors.Join(Addresses.Delete(w, AddressID), Hostnames.Delete(w, HostnameID))
}

// order is the links that networkd configures: listed ones in the order of the list, then the others by name.
func (o *owner) order() []string {
	names := lists.Of(o.plans, func(p config.Link) string { return p.Name })
	names = append(names, missing(slices.Sorted(maps.Keys(o.links)), names)...)
	return slices.DeleteFunc(names, func(name string) bool {
		l, here := o.links[name]
		if here {
			_, here = o.plan(l)
		}
		return !here
	})
}

// loop reconciles at first, and after each change.
func (o *owner) loop(ctx context.Context, configs <-chan struct{}) error {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	observe := time.NewTicker(observeEvery)
	defer observe.Stop()
	for changed, reported := true, uint64(0); ; {
		if changed {
			o.reconcile(ctx)
		}
		if changed || reported != o.version { // not at each event of a pod's link
			if err := o.report(); err != nil {
				return err
			}
			reported = o.version
		}
		var err error
		changed = false
		select {
		case <-ctx.Done():
			return nil
		case <-configs:
			changed, err = o.configure()
		case o.without = <-o.typed:
			_, err = o.configure()
			o.byHand, o.settled, changed = true, false, true
		case take := <-o.heard:
			changed = take()
		case <-observe.C:
			err = errors.Join(o.reportObjects(), o.reportNeighbors(), o.reportLLDP(time.Now()))
			changed = len(o.tunnels) > 0
		case now := <-tick.C:
			changed = !o.settled || o.configured && (o.savedAddr != o.pinned || !maps.Equal(o.savedCards, o.cards)) || len(o.errs) > 0 || !now.Before(o.due)
			if !changed {
				o.spent = 0
			}
		}
		if err != nil {
			return err
		}
	}
}
