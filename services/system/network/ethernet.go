package network

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// tuned are the last settings of a card's driver, and what it said.
type tuned struct {
	index int
	spec  *config.Ethernet
	at    time.Time
	err   error
}

// tune gives a card's driver its settings: once, and then each minute if they aren't so any more. A driver may reset its card for them.
func (o *owner) tune(l netlink.Link, e *config.Ethernet, now time.Time) error {
	if e == nil {
		return nil
	}
	name, index := l.Attrs().Name, l.Attrs().Index
	if had := o.tuned[name]; had.index == index && had.spec == e && now.Sub(had.at) < againMax {
		return had.err
	}
	err := o.o.driver(name, e)
	if err != nil {
		err = fmt.Errorf("settings of the driver of %s: %w", name, err)
	}
	o.tuned[name] = tuned{index, e, now, err}
	return err
}

// configureDriver changes what is different from the settings.
func configureDriver(link string, e *config.Ethernet) error {
	tool, err := ethtool.NewEthtool()
	if err != nil {
		return err
	}
	defer tool.Close()
	var wake uint32
	for _, event := range e.WakeOnLAN {
		wake |= config.WakeEvents[event]
	}
	return errors.Join(
		adjust("rings", link, e.Rings != config.EthernetRings{}, tool.GetRing, tool.SetRing, func(r *ethtool.Ring) {
			r.RxPending, r.TxPending = cmp.Or(e.Rings.RX, r.RxPending), cmp.Or(e.Rings.TX, r.TxPending)
		}),
		adjust("channels", link, e.Channels != config.EthernetChannels{}, tool.GetChannels, tool.SetChannels, func(c *ethtool.Channels) {
			c.RxCount, c.TxCount = cmp.Or(e.Channels.RX, c.RxCount), cmp.Or(e.Channels.TX, c.TxCount)
			c.OtherCount, c.CombinedCount = cmp.Or(e.Channels.Other, c.OtherCount), cmp.Or(e.Channels.Combined, c.CombinedCount)
		}),
		adjust("wakeOnLan", link, len(e.WakeOnLAN) > 0, tool.GetWakeOnLan, tool.SetWakeOnLan, func(w *ethtool.WakeOnLan) { w.Opts = wake }),
		setFeatures(tool, link, e.Features),
	)
}

// adjust writes settings of a driver if they change.
func adjust[T comparable](what, link string, wanted bool, get func(string) (T, error), set func(string, T) (T, error), change func(*T)) error {
	if !wanted {
		return nil
	}
	is, err := get(link)
	want := is
	if change(&want); err == nil && want != is {
		_, err = set(link, want)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// setFeatures looks again afterwards: the kernel ignores what a driver can't change.
func setFeatures(tool *ethtool.Ethtool, link string, want map[string]bool) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(want)) {
		is, err := tool.Features(link)
		if now, known := is[name]; err == nil && (!known || now != want[name]) {
			err = tool.Change(link, map[string]bool{name: want[name]})
			if is, _ = tool.Features(link); err == nil && is[name] != want[name] {
				err = errors.New("the driver doesn't change it")
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("feature %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
