package config

import (
	"fmt"
	"strings"
	"testing"
)

// Rules that leave a way to the machine API are accepted, and so is what doesn't touch it.
func TestFirewallRules(t *testing.T) {
	t.Parallel()
	const drop = "{name: rest, action: drop}"
	many := make([]string, 0, 251)
	for i := range 251 {
		many = append(many, fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))
	}
	for rules, want := range map[string]string{
		"{name: admin, action: accept, protocol: tcp, ports: [50000], sources: [10.1.0.0/16]}, " + drop: "",
		"{name: office, action: accept, sources: [10.1.0.0/16]}, " + drop:                               "",
		"{name: web, action: drop, protocol: tcp, ports: [80, 8000-8100]}":                              "",
		"{name: udp, action: drop, protocol: udp}":                                                      "",
		"{name: wan, action: drop, interface: eth1}":                                                    "",
		"{name: bad, action: drop, sources: [198.51.100.0/24]}":                                         "",
		"{name: alias, action: drop, destinations: [198.51.100.0/24]}":                                  "",
		"{name: many, action: drop, sources: [" + strings.Join(many[:250], ", ") + "]}":                 "",
		"{name: many, action: drop, sources: [" + strings.Join(many, ", ") + "]}":                       "have 251 combinations of ports, sources and destinations, and a node compares 250",
		drop + ", {name: late, action: accept, protocol: tcp, ports: [50000]}":                          "drops the machine API",
	} {
		_, _, problems := load(t, with(document(t, Worker), "machine", "network: {firewall: {rules: ["+rules+"]}}"))
		got := strings.Join(problems, "\n")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%.100s: problems are %q, want %q", rules, got, want)
		}
	}
}
