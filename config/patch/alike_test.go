package patch

import (
	"fmt"
	"strings"
	"testing"
)

// Entries of one name aren't lost: what a patch means with one entry, where the document has several of its name, or
// other ones without a name.
func TestPatchesOfEqualKeysLoseNothing(t *testing.T) {
	const one, two = "02:ab:12:34:00:01", "02:ab:12:34:00:02"
	entry := func(fields string) string { return "      - {" + fields + "}\n" }
	for _, tt := range []struct{ name, doc, patch, want string }{
		// Several entries of one interface.
		{"another address", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, cidr: 10.2.0.5/24", "+" + entry("interface: eth0, cidr: 10.2.0.5/24")},
		{"that of an address", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, cidr: 10.1.0.5/24, mtu: 1400",
			"-" + entry("interface: eth0, cidr: 10.1.0.5/24") + "+" + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 1400")},
		{"a value that one has", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 1400"), "interface: eth0, mtu: 9000",
			"-" + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 1400") + "+" + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 9000")},
		{"a value that none has", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, mtu: 9000",
			"-" + entry("interface: eth0, cidr: 10.0.0.5/24") + "+" + entry("interface: eth0, cidr: 10.0.0.5/24, mtu: 9000")},
		{"a value to remove", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 1400"), "interface: eth0, mtu: null",
			"-" + entry("interface: eth0, cidr: 10.1.0.5/24, mtu: 1400") + "+" + entry("interface: eth0, cidr: 10.1.0.5/24")},
		{"an address beside a value that is there", entry("interface: eth0, cidr: 10.0.0.5/24, dhcp: true") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, dhcp: true, cidr: 10.2.0.5/24",
			"+" + entry("interface: eth0, dhcp: true, cidr: 10.2.0.5/24")},
		{"all of them", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, cidr: 10.0.0.6/24}, {interface: eth0, cidr: 10.1.0.6/24",
			"-" + entry("interface: eth0, cidr: 10.0.0.5/24") + "-" + entry("interface: eth0, cidr: 10.1.0.5/24") + "+" + entry("interface: eth0, cidr: 10.0.0.6/24") + "+" + entry("interface: eth0, cidr: 10.1.0.6/24")},
		{"all of them, in another order", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24"), "interface: eth0, cidr: 10.1.0.5/24}, {interface: eth0, cidr: 10.0.0.5/24", ""},
		{"delete", entry("interface: eth0, cidr: 10.0.0.5/24") + entry("interface: eth0, cidr: 10.1.0.5/24") + entry("interface: eth1"), "interface: eth0, $patch: delete",
			"-" + entry("interface: eth0, cidr: 10.0.0.5/24") + "-" + entry("interface: eth0, cidr: 10.1.0.5/24")},
		// Entries without a name.
		{"new cards", entry("interface: eth0, dhcp: true"), "hardwareAddr: '" + one + "', mtu: 1400}, {hardwareAddr: '" + two + "', mtu: 1500",
			"+" + entry("hardwareAddr: '"+one+"', mtu: 1400") + "+" + entry("hardwareAddr: '"+two+"', mtu: 1500")},
		{"one of two cards", entry("hardwareAddr: '"+one+"', mtu: 1400") + entry("hardwareAddr: '"+two+"', mtu: 1500"), "hardwareAddr: '" + two + "', mtu: 9000",
			"-" + entry("hardwareAddr: '"+two+"', mtu: 1500") + "+" + entry("hardwareAddr: '"+two+"', mtu: 9000")},
		{"the card of an alias", entry("interface: lan0, hardwareAddr: '"+one+"'") + entry("hardwareAddr: '"+two+"'"), "hardwareAddr: '" + one + "', mtu: 9000",
			"-" + entry("interface: lan0, hardwareAddr: '"+one+"'") + "+" + entry("interface: lan0, hardwareAddr: '"+one+"', mtu: 9000")},
		{"an alias for a card", entry("hardwareAddr: '" + one + "', mtu: 1400"), "interface: lan0, hardwareAddr: '" + one + "'",
			"-" + entry("hardwareAddr: '"+one+"', mtu: 1400") + "+" + entry("hardwareAddr: '"+one+"', mtu: 1400, interface: lan0")},
		{"two aliases with one driver", entry("interface: lan0, driver: igb") + entry("interface: lan1, driver: igb"), "interface: lan2, driver: igb", "+" + entry("interface: lan2, driver: igb")},
		{"two cards with one driver", entry("hardwareAddr: '" + one + "', driver: igb"), "hardwareAddr: '" + two + "', driver: igb", "+" + entry("hardwareAddr: '"+two+"', driver: igb")},
		{"neither", entry("interface: eth0"), "mtu: 1400", "error: patch: machine.network.interfaces: an entry has no interface, hardwareAddr, driver, busPath, which identifies it"},
		// Entries of entries.
		{"a default route of another table", entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]"), "interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.2, table: 100}]",
			"-" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]") + "+" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}, {network: 0.0.0.0/0, gateway: 10.0.0.2, table: 100}]")},
		{"the default route", entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]"), "interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.2}]",
			"-" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]") + "+" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.2}]")},
		{"the second of two default routes", entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 200}]"), "interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 50}]",
			"-" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 200}]") +
				"+" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 50}]")},
		{"a third default route", entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 200}]"), "interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.3, metric: 50}]",
			"-" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 200}]") +
				"+" + entry("interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 100}, {network: 0.0.0.0/0, gateway: 10.0.0.2, metric: 200}, {network: 0.0.0.0/0, gateway: 10.0.0.3, metric: 50}]")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := lines(t, "machine:\n  network:\n    interfaces:\n"+tt.doc, "machine: {network: {interfaces: [{"+tt.patch+"}]}}")
			want(t, tt.want, strings.ReplaceAll(got, `"`, "'"))
		})
	}
	files := "machine:\n  files:\n    - {path: /etc/x, op: append, content: a}\n    - {path: /etc/x, op: append, content: b}\n"
	want(t, "+    - {path: /etc/x, op: append, content: c}\n", lines(t, files, "machine: {files: [{path: /etc/x, op: append, content: c}]}"))
	hosts := "machine:\n  network:\n    extraHostEntries:\n      - {ip: 10.0.0.9, aliases: [a]}\n      - {ip: 10.0.0.9, aliases: [b]}\n"
	want(t, "+      - {ip: 10.0.0.9, aliases: [c]}\n", lines(t, hosts, "machine: {network: {extraHostEntries: [{ip: 10.0.0.9, aliases: [c]}]}}"))
}

// Many entries of one name cost no minutes: a node merges patches.
func TestManyEntriesOfOneName(t *testing.T) {
	list := func(entries int) string {
		text := "machine:\n  network:\n    interfaces:\n"
		for i := range entries {
			text += fmt.Sprintf("      - {interface: a, mtu: %d}\n", i)
		}
		return text
	}
	out, err := Apply([]byte(list(1000)), []byte(list(900)))
	if err != nil || string(out) != list(1000) {
		t.Errorf("%v, %d bytes", err, len(out))
	}
	if _, err := Apply([]byte(list(10_000)), []byte(list(9_000))); err == nil || !strings.Contains(err.Error(), "machine.network.interfaces: has too many entries to merge") {
		t.Error(err)
	}
}
