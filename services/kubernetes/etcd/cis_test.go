package etcd

import (
	"net/netip"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/cis"
)

func TestCIS(t *testing.T) {
	t.Parallel()
	args := arguments(self{"cp-1", netip.MustParseAddr("10.5.0.2")}, record{}, nil)
	cis.Check(t, "etcd", cis.Node{Commands: map[string][]string{ID: args}})
}
