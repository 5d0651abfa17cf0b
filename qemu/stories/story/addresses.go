//go:build story

package story

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Has says whether a container node has the address on one of its links. It asks
// this machine's kernel: so it is true also of a node that is frozen or cut off.
// One that is off has none.
func (c *Cluster) Has(node string, address netip.Addr) (bool, error) {
	pid, err := c.initOf(node)
	if err != nil || pid == 0 {
		return false, err
	}
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return false, nil // it has ended meanwhile
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return false, fmt.Errorf("network of %s: %w", node, err)
	}
	defer h.Close()
	all, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return false, fmt.Errorf("addresses of %s: %w", node, err)
	}
	for _, a := range all {
		if a.IP.Equal(address.AsSlice()) {
			return true, nil
		}
	}
	return false, nil
}

// initOf is the process of a container node that is PID 1 there; 0: it is off.
func (c *Cluster) initOf(node string) (int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		line, _ := os.ReadFile(dir + "/cmdline")
		if !strings.HasPrefix(string(line), "/sbin/init\x00--mode=container") {
			continue
		}
		in, _ := os.ReadFile(dir + "/cgroup")
		if strings.Contains(string(in), "/garboard/"+c.Name+"/"+node+"\n") || strings.Contains(string(in), "/garboard/"+c.Name+"/"+node+"/") {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, nil
}
