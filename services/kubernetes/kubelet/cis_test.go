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
	for path, data := range rendered {
		node.Files[path] = cis.File{Mode: configMode, Content: data}
	}
	cis.Check(t, "kubelet", node)
}
