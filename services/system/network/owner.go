package network

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/mdlayher/socket"
	"github.com/vishvananda/netlink"
)

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
	}
	kept, err1 := boot.Kept(d.o.pinFile, netip.ParseAddr)
	name, err2 := boot.Kept(nameFile(d.o.pinFile), cleanHostname)
	if err := errors.Join(err1, err2); err != nil {
		o.log.Warn("the address or the name of earlier boots is unknown: " + err.Error())
	}
	o.savedAddr, o.pinned, o.savedName, o.hostname = kept, kept, name, name

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
	if !o.settled {
		return true, nil
	}
	// The node's name and address are chosen by the settings of the first configuration, and aren't published before
	// they are applied.
	o.log.Info("the configuration has come: going on with it")
	o.settled, o.firstAddr, o.hostname, o.pinned = false, time.Time{}, o.savedName, o.savedAddr
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
			changed = !o.settled || o.configured && o.savedAddr != o.pinned || len(o.errs) > 0 || !now.Before(o.due)
			if !changed {
				o.spent = 0
			}
		}
		if err != nil {
			return err
		}
	}
}
