package console

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// linkDir has all links of the kernel, by name.
const linkDir = "/sys/class/net/"

// settings are what is typed after `network`; nothing is the default of a machine without a configuration.
func settings(args []string) (n config.Network, err error) {
	if len(args) == 0 {
		return n, nil
	}
	if len(args) == 1 {
		return n, errors.New("the address is missing, such as 192.168.1.5/24, or dhcp")
	}
	name, tag, tagged := strings.Cut(args[0], ".")
	if links, err := filepath.Glob(linkDir + "*"); err == nil && !slices.Contains(links, linkDir+name) {
		return n, fmt.Errorf("interface %s: there are %s", name, strings.ReplaceAll(strings.Join(links, ", "), linkDir, ""))
	}
	v := config.VLAN{DHCP: args[1] == "dhcp"}
	if tagged {
		if v.ID, err = strconv.Atoi(tag); err != nil || v.ID < 1 || v.ID > 4094 {
			return n, fmt.Errorf("VLAN %s: must be 1 to 4094", tag)
		}
	}
	if !v.DHCP {
		if v.CIDR, err = netip.ParsePrefix(args[1]); err != nil {
			return n, fmt.Errorf("address %s: must be an address with its prefix length, such as 192.168.1.5/24, or dhcp", args[1])
		}
	}
	var servers []netip.Addr
	for _, text := range args[2:] {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return n, err
		}
		servers = append(servers, a)
	}
	if len(servers) > 0 {
		v.Routes = []config.Route{config.DefaultRoute(servers[0])}
		n.Nameservers = servers[1:]
	}
	i := config.Interface{Name: name, CIDR: v.CIDR, DHCP: v.DHCP, Routes: v.Routes}
	if tagged {
		i = config.Interface{Name: name, VLANs: []config.VLAN{v}}
	}
	n.Interfaces = []config.Interface{i}
	return n, nil
}
