//go:build e2e

package e2etest

import (
	"os/exec"
	"strings"
)

// A packet filter notes each address outside of the nodes' network that a packet is for.
const audit = `table inet audit {
  set four { typeof ip daddr; size 65535; flags dynamic; }
  set six { typeof ip6 daddr; size 65535; flags dynamic; }
  chain nodes {
    type filter hook prerouting priority -300;
    ip daddr != { 10.5.0.0/24, 127.0.0.0/8, 224.0.0.0/4, 255.255.255.255 } update @four { ip daddr }
    ip6 daddr != { ::1, fe80::/10, ff00::/8 } update @six { ip6 daddr }
  }
}
`

// Audit notes the packets of the nodes from now on. outside returns the addresses outside of their network that these
// are for; "" for none.
func (c *Cluster) Audit() (outside func() string) {
	c.t.Helper()
	inside := c.Network()
	nft := func(stdin string, args ...string) string {
		c.t.Helper()
		cmd := exec.Command("nft", args...)
		cmd.Stdin = strings.NewReader(stdin)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		err := inside.Do(cmd.Start)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil {
			c.t.Fatalf("nft %v: %v: %s", args, err, out.String())
		}
		return out.String()
	}
	nft(audit, "-f", "-")
	return func() string {
		c.t.Helper()
		sets := nft("", "list", "set", "inet", "audit", "four") + nft("", "list", "set", "inet", "audit", "six")
		if !strings.Contains(sets, "elements") {
			return ""
		}
		return sets
	}
}
