package etcd

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/network"
)

// etcd starts anew where the node has another address; what else changes of its addresses is no reason.
func TestRunEndsWithTheAddress(t *testing.T) {
	n := newRig(t).node("a", config.Init, netip.MustParseAddr("10.5.0.2"))
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- n.whileAt(ctx, n.addr) }()
		as := n.o.Store.As("test")
		must(t, network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: n.addr, All: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24")}}))
		synctest.Wait()
		if len(ended) > 0 {
			t.Fatalf("with the same address: %v", <-ended)
		}
		must(t, network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.20")}))
		if err := <-ended; !errors.Is(err, errMoved) {
			t.Errorf("with another one: %v", err)
		}
	})
}
