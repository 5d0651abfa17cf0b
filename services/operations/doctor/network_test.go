package doctor

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
)

// waits is a service that publishes what it waits for. That networkd does so with these
// codes is shown where it runs.
func waits(code reason.Code, text string) func(context.Context, *dag.Handle) error {
	return func(ctx context.Context, h *dag.Handle) error {
		h.EventOf(code, text)
		<-ctx.Done()
		return nil
	}
}

func TestNoAddress(t *testing.T) {
	t.Parallel()
	for code, why := range map[reason.Code]string{
		network.LinkMissing: "network interface of the configuration is missing", network.DHCPUnanswered: "No DHCP server answers", network.NoValidSubnet: "validSubnets", network.AddressTaken: "Another host of the network has the node's address", network.NoCarrier: "carrier", "": "no DHCP server answers on it",
	} {
		n := start(t, config.Worker, func(_ *node, services map[string]*dag.Service) { services["networkd"].Run = waits(code, "some text") })
		n.finds("network-no-address", info, "some text", why)
		n.later(startTime)
		n.finds("network-no-address", failure, "some text", why)
		n.finds("kubelet-not-running", info, "Follows from network-no-address")
		n.finds("service-failing", info, "Follows from network-no-address", "timed")
	}
}

func TestNoFamily(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
		n.config.Cluster.Network.PodSubnets = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
	})
	n.finds("network-no-family", failure, "fd00:10:244::/56", "machine.network.interfaces")
	a, err := network.Addresses.Get(n.store, network.AddressID)
	n.must(err)
	a.Spec.All = append(slices.Clone(a.Spec.All), netip.MustParsePrefix("fd00:5::2/64"))
	n.must(network.Addresses.Put(n.store.As(network.ID), network.AddressID, a.Spec))
	n.healthy()
}

func TestNoRoute(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.wayless = true
	n.healthy() // nothing that it needs is outside
	n.must(network.Resolvers.Put(n.store.As(network.ID), network.ResolversID, []netip.Addr{netip.MustParseAddr("192.0.2.53")}))
	n.finds("network-no-route", warning, "192.0.2.53", "no route for 0.0.0.0/0")
	n.wayless = false
	n.healthy()
}

func TestNoNameserver(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		n.must(network.Resolvers.Put(n.store.As(network.ID), network.ResolversID, []netip.Addr{}))
		u, err := config.ParseURL("https://kubernetes.garboard.invalid:6443")
		n.must(err)
		n.config.Cluster.ControlPlane.Endpoint = u
	})
	n.finds("no-nameserver", failure, "kubernetes.garboard.invalid", "machine.network.nameservers")
	n.finds("endpoint-not-resolving", info, "Follows from no-nameserver")
	n.must(network.Resolvers.Put(n.store.As(network.ID), network.ResolversID, []netip.Addr{netip.MustParseAddr("10.5.0.1")}))
	n.finds("endpoint-not-resolving", failure, "kubernetes.garboard.invalid")
	n.lacks("no-nameserver")

	// By address, nothing is to be resolved.
	start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
		n.must(network.Resolvers.Put(n.store.As(network.ID), network.ResolversID, []netip.Addr{}))
	}).healthy()
}

func TestNameServerSilent(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	silent := errors.New("read udp 10.5.0.2:4711->10.5.0.3:53: i/o timeout")
	n.answers = []resolver.Answer{{Server: "10.5.0.1:53"}, {Server: "10.5.0.3:53", Err: silent}}
	n.finds("nameserver-silent", warning, "Not all name servers answer", "10.5.0.3:53", "i/o timeout", "machine.network.nameservers")
	n.answers[0].Err = silent
	n.finds("nameserver-silent", failure, "No name server answers")
	n.answers = nil
	n.healthy()
}
