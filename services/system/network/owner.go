package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// retryEvery is how often unfinished work is retried: a link that the kernel
	// refused, a node address to store, a link that others depend on.
	retryEvery = time.Second
	// linkGrace is how long links without configuration may take to get an address
	// after the first one has one, so that the node's address doesn't depend on
	// which server was faster.
	linkGrace = 5 * time.Second
	// pinGrace is the same if none of them has the address of an earlier boot:
	// etcd and others identify the node by it. After a loss of power, a server or
	// a switch may start more slowly than the machine.
	pinGrace = time.Minute
)

// owner is one run of the service. Only one goroutine uses it.
type owner struct {
	*Daemon
	h   *dag.Handle
	log *slog.Logger

	cfg        *config.Config // an empty one in maintenance mode
	version    uint64         // of cfg
	configured bool           // there is a configuration
	plans      []config.Link
	virtuals   []virtual
	members    map[string]string // of bonds: the bond's name
	links      map[string]netlink.Link
	gone       map[int]bool // by index: links that we have removed, until the kernel has reported it
	// unsubscribe ends the last subscription to links.
	unsubscribe context.CancelFunc
	clients     map[leaseKey]*leased
	changed     chan leaseChange
	ends        time.Time        // when the next leased address ends; zero: none does
	errs        map[string]error // by link: what the kernel refused
	files       files
	named       map[string]lookup // by name of a WireGuard peer
	found       chan lookup
	lookups     sync.WaitGroup

	firstAddr       time.Time // when the first unlisted link had an address
	waiting         string    // the last reported reason to wait
	since           time.Time // since when
	linkWarned      bool      // a missing link was logged at the console
	settled         bool      // everything was there once
	warnedNoAddress bool      // the loss of the address was logged
	hostname        string    // from a lease or a MAC address: not changed once chosen
	// announced is the configured name, for the goroutines of the clients: a
	// server gets a new one when the lease is extended.
	announced atomic.Pointer[string]
	pinned    netip.Addr
	pinSaved  bool
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	o := &owner{
		Daemon:  d,
		h:       h,
		log:     h.Log,
		links:   map[string]netlink.Link{},
		gone:    map[int]bool{},
		clients: map[leaseKey]*leased{},
		changed: make(chan leaseChange),
		errs:    map[string]error{},
		files:   files{dir: d.o.etcDir},
		named:   map[string]lookup{},
		found:   make(chan lookup),
	}
	var err error
	if o.pinned, err = readPin(d.o.pinFile); err != nil {
		o.log.Warn("the address of earlier boots is unknown: " + err.Error())
	}
	o.pinSaved = o.pinned.IsValid()

	ctx, cancel := context.WithCancel(ctx)
	defer o.lookups.Wait()
	defer o.stopClients()
	defer cancel()
	configs := d.o.Store.Watch(ctx, machine.Configs.Type())
	if err := o.configure(); err != nil {
		return err
	}
	links, err := o.subscribe(ctx)
	if err != nil {
		return err
	}
	return o.loop(ctx, configs, links)
}

// subscribe receives events of every link, and lists all in one step: with some of them only,
// the clients and addresses of the others would be removed.
func (o *owner) subscribe(ctx context.Context) (<-chan netlink.LinkUpdate, error) {
	if o.unsubscribe != nil {
		o.unsubscribe()
	}
	ctx, o.unsubscribe = context.WithCancel(ctx)
	ch := make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(ch, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to links: %w", err)
	}
	all, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) && ctx.Err() == nil { // a link came or went meanwhile
		all, err = netlink.LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("list the links: %w", err)
	}
	clear(o.gone)
	for _, l := range all {
		o.note(netlink.LinkUpdate{Link: l})
	}
	maps.DeleteFunc(o.links, func(_ string, l netlink.Link) bool {
		return !slices.ContainsFunc(all, func(a netlink.Link) bool { return a.Attrs().Index == l.Attrs().Index })
	})
	return ch, nil
}

// configure applies the configuration; without one, an empty one.
func (o *owner) configure() error {
	cfg, err := machine.Configs.Get(o.o.Store, machine.ConfigID)
	if errors.Is(err, resource.ErrNotFound) {
		o.cfg = &config.Config{Machine: config.Machine{Network: o.without}}
		o.plans, o.virtuals, o.members = expand(o.without.Links())
		o.announced.Store(new(string))
		return nil
	}
	if err != nil {
		return err
	}
	o.cfg, o.version = cfg.Spec, cfg.Version
	o.plans, o.virtuals, o.members = expand(cfg.Spec.Machine.Network.Links())
	o.announced.Store(&cfg.Spec.Machine.Network.Hostname)
	if !o.configured {
		o.configured = true
		return o.takeOver()
	}
	return nil
}

// takeOver starts again with the first configuration: the node's name and
// address are chosen by its settings, and aren't published before they are
// applied.
func (o *owner) takeOver() error {
	if !o.settled {
		return nil
	}
	o.log.Info("the configuration has come: going on with it")
	o.settled, o.firstAddr, o.hostname = false, time.Time{}, ""
	if !o.pinSaved {
		o.pinned = netip.Addr{}
	}
	w := o.o.Store.As(ID)
	return errors.Join(Addresses.Delete(w, AddressID), Hostnames.Delete(w, HostnameID))
}

// note processes an event of a link and reports whether it matters: pods' links
// are added and removed all the time.
func (o *owner) note(u netlink.LinkUpdate) bool {
	// An event of a bridge's port doesn't have the link's kind, so that a pod's veth
	// would look like a network card, and "deleted" only means removed from the bridge.
	if u.Family == unix.AF_BRIDGE {
		return false
	}
	a := u.Attrs()
	if o.gone[a.Index] && u.Header.Type != unix.RTM_DELLINK {
		return false // older than the removal: the link can't be used
	}
	maps.DeleteFunc(o.links, func(name string, l netlink.Link) bool {
		return l.Attrs().Index == a.Index && name != a.Name // renamed
	})
	_, managed := planFor(o.plans, a.Name, o.o.physical(u.Link))
	if u.Header.Type == unix.RTM_DELLINK {
		delete(o.gone, a.Index)
		delete(o.links, a.Name)
		delete(o.applied, a.Name)
		return managed
	}
	old, known := o.links[a.Name]
	o.links[a.Name] = u.Link
	if !managed {
		return false
	}
	if !known {
		return true
	}
	if old.Attrs().Flags&net.FlagUp == 0 && a.Flags&net.FlagUp != 0 {
		delete(o.applied, a.Name) // the kernel has dropped the routes with the link's down
	}
	// A new member of a bond is up before it is a member, and a link that was
	// removed from the configuration meanwhile can leave only then.
	changed := old.Attrs().Index != a.Index || old.Attrs().Flags != a.Flags || carrier(old) != carrier(u.Link) ||
		old.Attrs().MasterIndex != a.MasterIndex
	for key, c := range o.clients {
		// A cable that was unplugged for a short time may be visible only as an event without a change.
		if key.link == a.Name && carrier(u.Link) && (!carrier(old) || !changed && c.lease == nil) {
			sleep.Wake(c.kick)
		}
	}
	return changed
}

func carrier(l netlink.Link) bool { return l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 }

// reconcile makes the links, leases, files and resources match the configuration.
func (o *owner) reconcile(ctx context.Context) {
	var all []candidate
	order, routes, now := uint32(0), taken{}, time.Now()
	o.build(ctx)
	for _, name := range o.order() {
		l := o.links[name]
		p, managed := planFor(o.plans, name, o.o.physical(l))
		o.ask(ctx, l, p, managed)
		if !managed {
			o.withdraw(l)
			continue
		}
		is := want(p, o.leases(name), order, routes, now)
		if len(o.sources(p)) > 0 {
			order++
		}
		o.applyTo(l, is)
		all = append(all, candidates(name, o.applied[name], o.cfg.Machine.Kubelet.NodeIP.ValidSubnets)...)
	}
	for key := range o.clients {
		if _, here := o.links[key.link]; !here {
			o.stopClient(key)
		}
	}
	o.ends = o.nextEnd(now)
	o.forget()
	o.publish(all)
}

// forget drops errors of links that don't exist, or aren't wanted, any more.
func (o *owner) forget() {
	maps.DeleteFunc(o.errs, func(key string, _ error) bool {
		if name, ok := strings.CutPrefix(key, making); ok {
			return !slices.ContainsFunc(o.virtuals, func(v virtual) bool { return v.name == name })
		}
		_, here := o.links[key]
		return !here && key != namesKey
	})
}

// order is listed links in the order of the list, then the others by name.
func (o *owner) order() []string {
	names := slices.Sorted(maps.Keys(o.links))
	at := func(name string) int {
		i := slices.IndexFunc(o.plans, func(p config.Link) bool { return p.Name == name })
		if i < 0 {
			return len(o.plans)
		}
		return i
	}
	slices.SortStableFunc(names, func(a, b string) int { return at(a) - at(b) })
	return names
}

func (o *owner) applyTo(l netlink.Link, is linkState) {
	name, index := l.Attrs().Name, l.Attrs().Index
	err := bringUp(l)
	if err == nil {
		was := o.applied[name]
		if was.index != index {
			was = linkState{}
		}
		o.applied[name], err = o.o.apply(l, was, is)
	}
	o.refused(name, err)
}

// withdraw removes our settings from a link that isn't managed any more.
func (o *owner) withdraw(l netlink.Link) {
	name := l.Attrs().Name
	was, ours := o.applied[name]
	if !ours || was.index != l.Attrs().Index {
		delete(o.errs, name)
		return
	}
	_, err := o.o.apply(l, was, linkState{})
	delete(o.applied, name)
	o.refused(name, err)
}

// refused records, and logs once, what the kernel refused.
func (o *owner) refused(name string, err error) {
	if err == nil {
		delete(o.errs, name)
		return
	}
	if old := o.errs[name]; old == nil || old.Error() != err.Error() {
		o.log.Warn(err.Error() + "; trying again")
	}
	o.errs[name] = err
}

// loop reconciles at first, and after each change.
func (o *owner) loop(ctx context.Context, configs <-chan resource.Event, links <-chan netlink.LinkUpdate) error {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	observe := time.NewTicker(observeEvery)
	defer observe.Stop()
	for changed := true; ; {
		if changed {
			o.reconcile(ctx)
		}
		if err := o.report(); err != nil {
			return err
		}
		changed = false
		select {
		case <-ctx.Done():
			return nil
		case <-configs:
			old, before := o.cfg, o.configured
			if err := o.configure(); err != nil {
				return err
			}
			changed = before != o.configured || !reflect.DeepEqual(old.Machine.Network, o.cfg.Machine.Network) ||
				!reflect.DeepEqual(old.Machine.Kubelet.NodeIP, o.cfg.Machine.Kubelet.NodeIP)
		case o.without = <-o.typed:
			if err := o.configure(); err != nil {
				return err
			}
			o.settled, changed = false, true
		case u, open := <-links:
			if !open { // the kernel's buffer overflowed: list all anew
				if ctx.Err() != nil {
					return nil
				}
				var err error
				if links, err = o.subscribe(ctx); err != nil {
					return err
				}
			}
			changed = !open || o.note(u)
		case c := <-o.changed:
			if changed = o.clients[c.key] == c.from; changed { // it may have been stopped meanwhile
				c.from.lease = c.lease
			}
		case l := <-o.found:
			o.named[l.host] = l
			changed = true
		case <-observe.C:
			if err := o.observe(); err != nil {
				return err
			}
		case now := <-tick.C:
			ended := !o.ends.IsZero() && !now.Before(o.ends)
			changed = !o.settled || o.configured && !o.pinSaved || len(o.errs) > 0 || ended
		}
	}
}

// report publishes the progress.
func (o *owner) report() error {
	s := Status{Config: o.version}
	for _, name := range slices.Sorted(maps.Keys(o.errs)) {
		s.Problems = append(s.Problems, o.errs[name].Error())
	}
	for _, name := range o.order() {
		s.Addresses = append(s.Addresses, o.applied[name].addresses...)
	}
	return Statuses.Put(o.o.Store.As(ID), ID, s)
}
