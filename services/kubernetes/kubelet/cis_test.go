package kubelet

import (
	"net/netip"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/cis"
)

func TestCIS(t *testing.T) {
	t.Parallel()
	c := cluster(t, nil)
	rendered, err := files(boot.Machine, c)
	if err != nil {
		t.Fatal(err)
	}
	node := cis.Node{Commands: map[string][]string{ID: commandLine(c, "cp-1", []netip.Addr{netip.MustParseAddr("10.5.0.2")})}, Files: map[string]cis.File{}}
	for _, f := range rendered {
		node.Files[f.path] = cis.File{Mode: f.perm, Content: f.data}
	}
	cis.Check(t, "kubelet", node)
}
