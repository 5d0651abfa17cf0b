package etcd

import (
	"context"
	"net/netip"
	"net/url"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

// Meeting is a control plane that this node has met; its ID is the address.
type Meeting struct {
	Since time.Time `yaml:"since" column:"SINCE"`
}

// Met are the other members of etcd, and the nodes that called the machine API with the certificate of a control plane.
// The firewall lets them reach this node's member. None is forgotten before the next boot.
var Met = resource.Define[Meeting](resource.Definition{
	Type: "MetControlPlanes.etcd.garboard.dev", Kind: "MetControlPlane", Namespace: "runtime",
})

// Meet notes control planes, by address and port or by URL.
func (e *Etcd) Meet(places ...string) error {
	for _, addr := range hosts(places) {
		id := addr.WithZone("").String()
		if _, err := Met.Get(e.o.Store, id); err == nil {
			continue
		}
		if err := Met.Put(e.o.Store.As(ID), id, Meeting{time.Now()}); err != nil {
			return err
		}
	}
	return nil
}

// hosts are the addresses in URLs and in addresses with a port.
func hosts(places []string) (all []netip.Addr) {
	for _, place := range places {
		if u, err := url.Parse(place); err == nil && u.Host != "" {
			place = u.Host
		}
		all = append(all, lists.Of(addresses(place), netip.Addr.Unmap)...)
	}
	return all
}

// greet calls the machine API of the members' nodes. They let this node reach their etcd from then on, wherever it is.
func (e *Etcd) greet(ctx context.Context, urls []string) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, addr := range hosts(urls) {
		// One that doesn't answer may still be reached, from a network that it is in itself.
		wg.Go(func() { _, _ = e.o.Peers.Beginning(ctx, addr) })
	}
	wg.Wait()
}
