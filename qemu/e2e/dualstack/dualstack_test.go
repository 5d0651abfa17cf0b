//go:build e2e && long

// Package dualstack tests clusters of two nodes whose networks have both address families, or
// IPv6 only: pods and Services of each family answer from both nodes.
package dualstack

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

func TestBothFamilies(t *testing.T) {
	serves(t, "dual", netip.MustParsePrefix("10.5.0.0/24"), netip.MustParsePrefix("fd00:5::/64"))
}

func TestIPv6First(t *testing.T) {
	serves(t, "first", netip.MustParsePrefix("fd00:5::/64"), netip.MustParsePrefix("10.5.0.0/24"))
}

func TestIPv6Only(t *testing.T) {
	serves(t, "six", netip.MustParsePrefix("fd00:5::/64"), netip.Prefix{})
}

func serves(t *testing.T, name string, first, second netip.Prefix) {
	c, m := e2etest.Ready(t, name, qemu.Container, e2etest.Nodes(1, 1), func(o *qemu.Options) { o.Network, o.Second = first, second })
	for _, n := range c.Nodes {
		want := []string{n.Address.String()}
		if n.Second.IsValid() {
			want = append(want, n.Second.String())
		}
		got := strings.Fields(c.Kubectl("get", "node", n.Name, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`))
		if !slices.Equal(got, want) {
			t.Errorf("addresses of %s are %q, want %q", n.Name, got, want)
		}
		address := n.Address.String()
		c.Eventually(time.Minute, n.Name+" has its certificate", func() error {
			_, err := c.TryGbctl("-n", address, "services")
			return err
		})
		if out := c.Gbctl("-n", address, "doctor"); strings.Contains(out, "no-family") {
			t.Error(out)
		}
	}
	c.Web()
	m.Reached(fmt.Sprintf("%d addresses and names answer from both nodes", c.WebAnswers()))
	c.Healthy()
}
