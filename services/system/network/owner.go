package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/mdlayher/socket"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// retryEvery is how often unfinished work is retried: a link that the kernel
	// refused, a node address to store, a link that others depend on.
	retryEvery = time.Second
	// maxAtOnce is how many changes by routers are taken over at once after a calm tick; more, with each tick.
	maxAtOnce = 8
	// failedFor is how long an address of an advertisement, which another host had, is a problem: until routers have advertised again (RFC 4861 §6.2.1).
	failedFor = 30 * time.Minute
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
	members    map[string]string // of bonds and bridges: the master's name
	aliases    map[string]string // by name of a link: its name in the configuration, if that is another
	links      map[string]netlink.Link
	ups        map[string]string // by name: how often a link got a carrier
	gone       map[int]bool      // by index: links that we have removed, until the kernel has reported it
	// unsubscribe ends the last subscription to links.
	unsubscribe context.CancelFunc
	clients     map[leaseKey]*leased
	changed     chan leaseChange
	due         time.Time        // when there is something to do without an event
	spent       int              // how many changes of routers were taken over since the last calm tick
	errs        map[string]error // by link: what the kernel refused
	wanted      []want
	state       actual // at the last look
	attempts    map[object]*attempt
	watches     map[address]watch // the searches for other hosts with our addresses
	held        map[object]bool   // addresses that other hosts know to be ours
	declined    map[leaseKey]declined
	files       files
	named       map[string]lookup // by name of a WireGuard peer
	found       chan lookup
	lookups     sync.WaitGroup
	lldp        *socket.Conn                    // nil: the kernel has no such sockets
	heard       chan func() bool                // what goroutines of this one have heard; they report whether that changes what is wanted
	switches    map[int]map[string]LinkNeighbor // by index of a card that has joined, and chassis

	firstAddr       time.Time       // when the node first had an address
	waiting         string          // the last reported reason to wait
	since           time.Time       // since when
	linkWarned      bool            // a missing link was logged at the console
	settled         bool            // everything was there once
	warnedNoAddress bool            // the loss of the address was logged
	toldServers     []netip.Addr    // too many name servers that were logged
	hostname        string          // from an earlier boot, a lease or a MAC address: not changed once chosen
	savedName       string          // on STATE
	toldNames       map[string]bool // names of leases that were logged because they aren't used
	// announced is the configured name, for the goroutines of the clients: a
	// server gets a new one when the lease is extended.
	announced atomic.Pointer[string]
	pinned    netip.Addr
	pinSaved  bool
}

func (d *Daemon) run(ctx context.Context, h *dag.Handle) error {
	o := &owner{
		Daemon:    d,
		h:         h,
		log:       h.Log,
		links:     map[string]netlink.Link{},
		ups:       map[string]string{},
		gone:      map[int]bool{},
		clients:   map[leaseKey]*leased{},
		changed:   make(chan leaseChange),
		errs:      map[string]error{},
		attempts:  map[object]*attempt{},
		watches:   map[address]watch{},
		held:      maps.Clone(d.known), // over a restart of the service
		declined:  map[leaseKey]declined{},
		files:     files{dir: d.o.etcDir},
		named:     map[string]lookup{},
		found:     make(chan lookup),
		toldNames: map[string]bool{},
		heard:     make(chan func() bool),
		switches:  map[int]map[string]LinkNeighbor{},
	}
	var err error
	if o.pinned, err = kept(d.o.pinFile, netip.ParseAddr); err != nil {
		o.log.Warn("the address of earlier boots is unknown: " + err.Error())
	}
	o.pinSaved = o.pinned.IsValid()
	if o.savedName, err = kept(nameFile(d.o.pinFile), cleanHostname); err != nil {
		o.log.Warn("the name of earlier boots is unknown: " + err.Error())
	}
	o.hostname = o.savedName

	ctx, cancel := context.WithCancel(ctx)
	defer o.lookups.Wait()
	defer o.stopClients()
	defer cancel()
	configs := d.o.Store.Watch(ctx, machine.Configs.Type())
	if err := o.configure(); err != nil {
		return err
	}
	if err := o.hearLLDP(ctx); err != nil {
		o.log.Warn("the neighbours of links stay unknown: " + err.Error())
	}
	events, err := o.subscribe(ctx)
	if err != nil {
		return err
	}
	return o.loop(ctx, configs, events)
}

// events are what the kernel reports. A channel is closed when it lost some.
type events struct {
	links     <-chan netlink.LinkUpdate
	addresses <-chan netlink.AddrUpdate
	notices   <-chan notice
}

// subscribe receives the events of the kernel, and lists all links in one step: with some of them only,
// the clients and addresses of the others would be removed.
func (o *owner) subscribe(ctx context.Context) (events, error) {
	if o.unsubscribe != nil {
		o.unsubscribe()
	}
	ctx, o.unsubscribe = context.WithCancel(ctx)
	links, addresses := make(chan netlink.LinkUpdate), make(chan netlink.AddrUpdate)
	e := events{links: links, addresses: addresses}
	// The library's senders end only after their last message was received.
	context.AfterFunc(ctx, func() {
		go drain(links)
		go drain(addresses)
	})
	for what, err := range map[string]error{
		"links":     netlink.LinkSubscribe(links, ctx.Done()),
		"addresses": netlink.AddrSubscribe(addresses, ctx.Done()),
	} {
		if err != nil {
			return e, fmt.Errorf("subscribe to %s: %w", what, err)
		}
	}
	var err error
	if e.notices, err = advertisements(ctx, o.log); err != nil {
		return e, err
	}
	all, err := dump(netlink.LinkList)
	if err != nil {
		return e, fmt.Errorf("list the links: %w", err)
	}
	clear(o.gone)
	for _, l := range all {
		o.note(netlink.LinkUpdate{Link: l})
	}
	maps.DeleteFunc(o.links, func(_ string, l netlink.Link) bool {
		return !slices.ContainsFunc(all, func(a netlink.Link) bool { return a.Attrs().Index == l.Attrs().Index })
	})
	return e, nil
}

// drain receives until the channel is closed.
func drain[T any](c <-chan T) {
	for range c {
	}
}

// configure applies the configuration; without one, an empty one.
func (o *owner) configure() error {
	cfg, err := machine.Configs.Get(o.o.Store, machine.ConfigID)
	if errors.Is(err, resource.ErrNotFound) {
		o.cfg = &config.Config{Machine: config.Machine{Network: o.without}}
		o.replan()
		o.announced.Store(new(string))
		return nil
	}
	if err != nil {
		return err
	}
	o.cfg, o.version = cfg.Spec, cfg.Version
	o.replan()
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
	o.settled, o.firstAddr, o.hostname = false, time.Time{}, o.savedName
	if !o.pinSaved {
		o.pinned = netip.Addr{}
	}
	w := o.o.Store.As(ID)
	return errors.Join(Addresses.Delete(w, AddressID), Hostnames.Delete(w, HostnameID))
}

// noteAddress reports whether an event of an address matters: one of ours is gone, or the kernel
// has made one, of a router advertisement, or found that another host has it.
func (o *owner) noteAddress(u netlink.AddrUpdate) bool {
	a := address{u.LinkIndex, prefixOf(&u.LinkAddress)}
	if _, mine := o.known[a]; mine {
		return !u.NewAddr || a.prefix.Addr().Is6() // duplicate address detection has ended
	}
	name := o.linkName(u.LinkIndex)
	l := o.links[name]
	if l == nil || u.Flags&(unix.IFA_F_PERMANENT|unix.IFA_F_DADFAILED) == unix.IFA_F_PERMANENT {
		return false
	}
	_, managed := o.plan(l)
	switch now, key := time.Now(), (leaseKey{name, a.prefix.String()}); {
	case u.NewAddr && u.Flags&(unix.IFA_F_DADFAILED|unix.IFA_F_TENTATIVE) == 0:
		delete(o.declined, key)
	case u.Flags&unix.IFA_F_DADFAILED != 0 && managed && len(o.declined) < maxAdvertised:
		maps.DeleteFunc(o.declined, func(_ leaseKey, d declined) bool { return now.After(d.until) })
		o.declined[key] = declined{until: now.Add(failedFor), problem: a.on(name) + ": " + errTaken.Error()}
	}
	return managed && o.afford()
}

// afford reports whether what a router has changed is taken over at once; else it is with the next tick. So no router makes
// networkd work all the time.
func (o *owner) afford() bool {
	if o.spent++; o.spent <= maxAtOnce {
		return true
	}
	o.due = time.Now()
	return false
}

// note processes an event of a link and reports whether it matters: pods' links
// are added and removed all the time.
func (o *owner) note(u netlink.LinkUpdate) bool {
	// An event of a bridge's port doesn't have the link's kind, so that a pod's veth
	// would look like a network card, and "deleted" only means removed from the bridge.
	// An event that is older than the removal of a link is of one that can't be used.
	a := u.Attrs()
	if u.Family == unix.AF_BRIDGE || o.gone[a.Index] && u.Header.Type != unix.RTM_DELLINK {
		return false
	}
	maps.DeleteFunc(o.links, func(name string, l netlink.Link) bool {
		return l.Attrs().Index == a.Index && name != a.Name // renamed
	})
	_, managed := o.plan(u.Link)
	if u.Header.Type == unix.RTM_DELLINK {
		if _, ours := o.made[a.Name]; ours && !o.gone[a.Index] {
			o.log.Warn(a.Name + " was removed by another program, or with the link that it was on; it is made again")
		}
		delete(o.gone, a.Index)
		delete(o.links, a.Name)
		delete(o.advertised, a.Index)
		delete(o.flags, a.Index)
		o.dropped(a.Index, true)
		return managed
	}
	old, known := o.links[a.Name]
	o.links[a.Name] = u.Link
	plugged := false
	if managed && carrier(u.Link) {
		ups, _ := os.ReadFile("/sys/class/net/" + a.Name + "/carrier_up_count")
		plugged, o.ups[a.Name] = o.ups[a.Name] != string(ups), string(ups)
	}
	if !managed || !known {
		return managed
	}
	if (old.Attrs().Flags^a.Flags)&net.FlagUp != 0 {
		o.dropped(a.Index, false)
	}
	// A new member of a bond is up before it is a member, and a link that was
	// removed from the configuration meanwhile can leave only then.
	changed := old.Attrs().Index != a.Index || old.Attrs().Flags != a.Flags || carrier(old) != carrier(u.Link) ||
		old.Attrs().MasterIndex != a.MasterIndex || old.Attrs().MTU != a.MTU || !bytes.Equal(old.Attrs().HardwareAddr, a.HardwareAddr)
	for key, c := range o.clients {
		// A cable that was unplugged for a short time may be visible only as an event without a change.
		if key.link == a.Name && carrier(u.Link) && (plugged || !carrier(old)) {
			sleep.Wake(c.kick)
		}
	}
	return changed
}

func carrier(l netlink.Link) bool { return l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 }

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

// loop reconciles at first, and after each change.
func (o *owner) loop(ctx context.Context, configs <-chan struct{}, e events) error {
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
		changed = false
		lost := false
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
		case u, open := <-e.links:
			changed = open && o.note(u)
			lost = !open
		case u, open := <-e.addresses:
			changed = open && o.noteAddress(u)
			lost = !open
		case n, open := <-e.notices:
			changed = open && (n.taken || (n.route || o.advertise(n, time.Now())) && o.afford())
			lost = !open
		case c := <-o.changed:
			if changed = o.clients[c.key] == c.from; changed { // it may have been stopped meanwhile
				c.from.lease = c.lease
			}
		case l := <-o.found:
			if l.err != nil {
				l.addr = o.named[l.host].addr
			}
			o.named[l.host] = l
			changed = true
		case take := <-o.heard:
			changed = take()
		case <-observe.C:
			if err := errors.Join(o.observe(), o.reportNeighbors(), o.reportLLDP(time.Now())); err != nil {
				return err
			}
		case now := <-tick.C:
			changed = !o.settled || o.configured && !o.pinSaved || len(o.errs) > 0 || !now.Before(o.due)
			if !changed {
				o.spent = 0
			}
		}
		if lost && ctx.Err() == nil { // the kernel's buffer overflowed: list all anew
			var err error
			if e, err = o.subscribe(ctx); err != nil {
				return err
			}
			changed = true
		}
	}
}
