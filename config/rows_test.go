package config

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// accepted removes the positions from the warnings of a document that must load.
func accepted(t *testing.T, doc string) (*Config, string) {
	t.Helper()
	c, warnings, problems := load(t, doc)
	if problems != nil {
		t.Fatal(strings.Join(problems, "\n"))
	}
	var kept []string
	for _, w := range warnings {
		if w = location.ReplaceAllString(w, ""); !strings.Contains(w, "no effect in this release") {
			kept = append(kept, w)
		}
	}
	return c, strings.Join(kept, "\n")
}

func refused(t *testing.T, doc string) string {
	t.Helper()
	_, _, problems := load(t, doc)
	for i, p := range problems {
		problems[i] = location.ReplaceAllString(p, "")
	}
	return strings.Join(problems, "\n")
}

func want(t *testing.T, want, got string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestQ01KeySlot(t *testing.T) {
	base := document(t, Init)
	key := func(fields string) string {
		return with(base, "machine", fmt.Sprintf("systemDiskEncryption:\n  ephemeral:\n    keys:\n      - {static: {passphrase: x}, %s}\n", fields))
	}
	c, warnings := accepted(t, key("keySlot: 3"))
	want(t, "machine.systemDiskEncryption.ephemeral.keys[0].static: "+onPlainState+"\nmachine.systemDiskEncryption.ephemeral.keys[0].keySlot: is deprecated; use slot", warnings)
	if slot := c.Machine.SystemDiskEncryption.Ephemeral.Keys[0].Slot; slot == nil || *slot != 3 {
		t.Errorf("slot %v", slot)
	}
	const path = "machine.systemDiskEncryption.ephemeral.keys[0]"
	want(t, path+".keySlot: is the same field as slot; keep only slot", refused(t, key("slot: 3, keySlot: 3")))
	want(t, path+".slot: is the same field as keySlot; keep only slot", refused(t, key("keySlot: 3, slot: 3")))
	want(t, path+".slot: 32 is out of range (0 to 31)", refused(t, key("keySlot: 32")))
}

func TestQ02EncryptionUnderMachine(t *testing.T) {
	want(t, "machine.state: unknown key; did you mean machine.systemDiskEncryption.state\n"+
		"machine.ephemeral: unknown key; did you mean machine.systemDiskEncryption.ephemeral",
		refused(t, with(document(t, Init), "machine", "state:\n  keys:\n    - nodeID: {}\n      slot: 1\nephemeral: {}\n")))
}

func TestQ03MirrorsBesideStar(t *testing.T) {
	want(t, `machine.registries["*"]: unknown key; did you mean machine.registries.mirrors["*"]`,
		refused(t, with(document(t, Init), "machine", "registries:\n  mirrors:\n  '*':\n    endpoints:\n    - http://10.5.0.1:6000/\n")))
}

func TestQ04WireGuard(t *testing.T) {
	link := func(endpoint string) string {
		return fmt.Sprintf(`interfaces:
  - interface: wg0
    mtu: 1500
    cidr: 192.168.2.1/24
    wireguard:
      privateKey: yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=
      listenPort: 51820
      peers:
        allowedIPs:
          - 192.168.88.0/24
        endpoint: %s
        publicKey: xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=
`, endpoint)
	}
	nested := func(lines string) string { return "network:\n  " + strings.ReplaceAll(lines, "\n", "\n  ") }
	c, warnings := accepted(t, with(document(t, Init), "machine", nested(link("209.202.254.14:8172"))))
	want(t, "machine.network.interfaces[0].wireguard.peers: is a list; a single entry is taken for a list of one", warnings)
	if peers := c.Machine.Network.Interfaces[0].WireGuard.Peers; len(peers) != 1 || peers[0].Endpoint != "209.202.254.14:8172" {
		t.Errorf("peers %+v", peers)
	}
	want(t, `machine.network.interfaces[0].wireguard.peers[0].endpoint: "209.202.254.14.8172" lacks a colon before the port; did you mean 209.202.254.14:8172`,
		refused(t, with(document(t, Init), "machine", nested(link("209.202.254.14.8172")))))
	for _, endpoint := range []string{"host", "host:0", "host:x", `":1"`} {
		if got := refused(t, with(document(t, Init), "machine", nested(link(endpoint)))); !strings.HasPrefix(got, "machine.network.interfaces[0].wireguard.peers[0].endpoint: ") {
			t.Errorf("%s: %s", endpoint, got)
		}
	}
	want(t, "network: unknown key; did you mean machine.network", refused(t, with(document(t, Init), "", nested(link("209.202.254.14:8172"))+"\n")))
}

func TestQ05Loopback(t *testing.T) {
	c, warnings := accepted(t, with(document(t, Init), "machine", "network: {interfaces: [{interface: lo0, cidr: 192.168.0.21/24}, {interface: lo, cidr: 10.2.2.2/24}]}"))
	want(t, `machine.network.interfaces[0].interface: "lo0" is an alias; Linux calls it "lo"`, warnings)
	if links := c.Machine.Network.Links(); len(links) != 1 || links[0].Name != "lo" {
		t.Errorf("links %+v", links)
	}
}

func TestQ06EntriesMerge(t *testing.T) {
	c, _ := accepted(t, with(document(t, Init), "machine", `network:
  interfaces:
    - {interface: eth0, cidr: 10.0.0.2/8, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]}
    - {interface: eth1, dhcp: true}
    - {interface: eth0, cidr: 192.168.0.2/24, mtu: 1400, vlans: [{vlanId: 5}]}
    - {interface: eth0, cidr: 10.0.0.2/8, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}, {network: 172.16.0.0/12, gateway: 10.0.0.3}]}
`))
	var got []string
	for _, l := range c.Machine.Network.Links() {
		got = append(got, fmt.Sprintf("%s %v %d %t %v %d", l.Name, l.Addresses, l.MTU, l.DHCP, l.Routes, len(l.VLANs)))
	}
	want(t, "eth0 [10.0.0.2/8 192.168.0.2/24] 1400 false [{0.0.0.0/0 10.0.0.1 1024 invalid IP 0 0 unicast} {172.16.0.0/12 10.0.0.3 1024 invalid IP 0 0 unicast}] 1\neth1 [] 0 true [] 0", strings.Join(got, "\n"))
}

func TestQ13Join(t *testing.T) {
	c, warnings := accepted(t, strings.Replace(document(t, Worker), "type: worker", "type: join", 1))
	want(t, `machine.type: "join" is an alias; use "worker"`, warnings)
	if c.Machine.Type != Worker {
		t.Errorf("type %s", c.Machine.Type)
	}
}

// A shared address that other hosts can't find gives a warning, and one that
// they can find gives none.
func TestS118SharedAddressOutsideOfItsSubnet(t *testing.T) {
	for _, tt := range []struct {
		interfaces string
		told       bool
	}{
		{"{interface: eth0, cidr: 192.168.1.20/24, vip: {ip: 192.168.2.15}}", true},
		{"{interface: eth0, cidr: 192.168.1.20/24}, {interface: eth0, cidr: 'fd00::1/64', vip: {ip: 192.168.2.15}}", true},
		{"{interface: eth0, cidr: 'fd00::1/64', vip: {ip: 'fd00::9'}}, {interface: eth0, cidr: 192.168.1.20/24}, {interface: eth1, cidr: 192.168.1.21/24, vip: {ip: 192.168.1.15}}", false},
		{"{interface: eth0, cidr: 192.168.1.20/24, vip: {ip: 192.168.1.15}}", false},
		{"{interface: eth0, cidr: 10.0.0.2/8}, {interface: eth0, cidr: 192.168.2.20/24, vip: {ip: 192.168.2.15}}", false},
		// the subnet from DHCP isn't known
		{"{interface: eth0, dhcp: true, cidr: 192.168.1.20/24, vip: {ip: 192.168.2.15}}", false},
		{"{interface: eth0, cidr: 'fd00::1/64', vip: {ip: 192.168.2.15}}", false},
		{"{interface: eth0, dhcp: true, vip: {ip: 192.168.2.15}}", false},
	} {
		_, warnings := accepted(t, with(document(t, ControlPlane), "machine", "network: {interfaces: ["+tt.interfaces+"]}"))
		if told := strings.Contains(warnings, "192.168.2.15 is outside of 192.168.1.0/24, the subnet of eth0: other hosts reach it only through routes to that link"); told != tt.told {
			t.Errorf("%s: %q", tt.interfaces, warnings)
		}
	}
}

// S-068: a machine does what the user of encryption relies on. A node in a container, which has no disk, says that it
// doesn't, as Load can't know it.
func TestS068EncryptionOnMachines(t *testing.T) {
	for _, partition := range []string{"state", "ephemeral"} {
		doc := with(document(t, Worker), "machine", "systemDiskEncryption: {"+partition+": {keys: [{nodeID: {}, slot: 0}]}}")
		if c, warnings := accepted(t, doc); warnings != "" || c.Machine.SystemDiskEncryption == (SystemDiskEncryption{}) {
			t.Errorf("%s on a machine: %s", partition, warnings)
		}
		_, warnings, err := LoadForContainer("test.yaml", []byte(doc))
		if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0].String(), "machine.systemDiskEncryption."+partition+": has no effect in a container") {
			t.Errorf("%s in a container: %v, warnings %v", partition, err, warnings)
		}
	}
	if _, warnings, err := LoadForContainer("test.yaml", []byte(document(t, Worker))); err != nil || len(warnings) > 0 {
		t.Errorf("%v, %v", err, warnings)
	}
}

// S-160: partitions of machine.disks have keys as the system's.
func TestEncryptionOfDataDisks(t *testing.T) {
	disks := func(key string) string {
		return with(document(t, Worker), "machine", "disks:\n  - name: data\n    device: /dev/sdb\n    partitions:\n      - {mountpoint: /var/mnt/data, encryption: {keys: ["+key+"]}}\n")
	}
	const field = "machine.disks[0].partitions[0].encryption"
	c, warnings := accepted(t, disks("{slot: 1, static: {passphrase: x}}"))
	want(t, field+".keys[0].static: "+onPlainState, warnings)
	if all := c.Encrypted(); len(all) != 1 || all[0].Label != "data" || *all[0].Keys[0].Slot != 1 {
		t.Errorf("%+v", all)
	}
	_, all, err := LoadForContainer("test.yaml", []byte(disks("{slot: 1, nodeID: {}}")))
	if err != nil || len(all) != 1 || !strings.Contains(all[0].String(), field+": has no effect in a container") {
		t.Errorf("%v, %v", all, err)
	}
	for key, why := range map[string]string{
		"": field + ".keys: is missing: an encrypted partition needs at least one", "{slot: 1}": field + ".keys[0]: needs exactly one of nodeID, static, kms and tpm",
		"{slot: 0, tpm: {}}":     field + ".keys[0].tpm: is for the system's disk",
		"{slot: 32, nodeID: {}}": field + ".keys[0].slot: 32 is out of range (0 to 31)",
	} {
		if _, _, problems := load(t, disks(key)); !strings.Contains(strings.Join(problems, "\n"), why) {
			t.Errorf("%q: %q", key, problems)
		}
	}
}

// A gateway must be in a network of its link, as far as these are known.
func TestGatewayOutsideOfItsNetworks(t *testing.T) {
	for _, tt := range []struct{ interfaces, path string }{
		{"{interface: eth0, cidr: 10.0.0.5/24, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1}]}", ""},
		{"{interface: eth0, cidr: 10.0.0.5/24, routes: [{network: 0.0.0.0/0, gateway: 10.0.1.1}]}", "[0].routes[0]"},
		{"{interface: eth0, cidr: 10.0.0.5/24}, {interface: eth1, cidr: 10.0.1.5/24, routes: [{network: 10.2.0.0/16, gateway: 10.0.0.1}]}", "[1].routes[0]"},
		{"{interface: eth0, cidr: 10.0.0.5/24}, {interface: eth0, cidr: 10.0.1.5/24, routes: [{network: 10.2.0.0/16, gateway: 10.0.0.1}]}", ""},
		{"{interface: eth0, acceptRA: true, routes: [{network: 0.0.0.0/0, gateway: 10.0.1.1}]}", "[0].routes[0]"},
		{"{interface: eth0, dhcp: true, routes: [{network: 0.0.0.0/0, gateway: 10.0.1.1}]}", ""},
		// some hosters require it
		{"{interface: eth0, cidr: 10.0.0.5/32, routes: [{network: 10.0.1.1/32}, {network: 0.0.0.0/0, gateway: 10.0.1.1}]}", ""},
		{"{interface: eth0, cidr: 'fd00::5/64', routes: [{network: '::/0', gateway: 'fe80::1'}]}", ""},
		{"{interface: eth0, cidr: 'fd00::5/64', routes: [{network: '::/0', gateway: 'fd01::1'}]}", "[0].routes[0]"},
		// routers may advertise it
		{"{interface: eth0, cidr: 10.0.0.5/24, routes: [{network: '::/0', gateway: 'fd01::1'}]}", ""},
		{"{interface: eth0, vlans: [{vlanId: 5, cidr: 10.0.0.5/24, routes: [{network: 10.2.0.0/16, gateway: 10.0.0.1}]}]}", ""},
		{"{interface: eth0, cidr: 10.0.1.5/24, vlans: [{vlanId: 5, cidr: 10.0.0.5/24, routes: [{network: 10.2.0.0/16, gateway: 10.0.1.1}]}]}", "[0].vlans[0].routes[0]"},
	} {
		_, warnings := accepted(t, with(document(t, Worker), "machine", "network: {interfaces: ["+tt.interfaces+"]}"))
		told := strings.HasPrefix(warnings, "machine.network.interfaces"+tt.path+".gateway: ") && strings.Contains(warnings, "is in none of the networks of ")
		if tt.path == "" && warnings != "" || tt.path != "" && !told || strings.Contains(warnings, "\n") {
			t.Errorf("%s: %q", tt.interfaces, warnings)
		}
	}
}

// S-042, S-282: a control plane boots with the format of the releases before static pods,
// with a warning. A configuration that lacks only one of both secrets is refused.
func TestS282FormatOfASelfHostedControlPlane(t *testing.T) {
	doc := document(t, ControlPlane)
	cut := func(doc, key string) string {
		t.Helper()
		section := regexp.MustCompile(`(?m)^  ` + key + `:\n(    .*\n)+`)
		if !section.MatchString(doc) {
			t.Fatalf("no section %s in\n%s", key, doc)
		}
		return section.ReplaceAllString(doc, "")
	}
	older := cut(cut(doc, "aggregatorCA"), "serviceAccount")
	c, warnings, problems := load(t, older)
	if len(problems) > 0 || c == nil || !c.SelfHosted() {
		t.Fatalf("problems: %q", problems)
	}
	if !strings.Contains(strings.Join(warnings, "\n"), "the format for a self-hosted control plane") {
		t.Errorf("warnings: %q", warnings)
	}
	for _, key := range []string{"aggregatorCA", "serviceAccount"} {
		if _, _, problems := load(t, cut(doc, key)); len(problems) == 0 {
			t.Errorf("a control plane without %s is accepted", key)
		}
	}
}

func TestWarnings(t *testing.T) {
	_, warnings := accepted(t, with(document(t, Init), "machine", "systemDiskEncryption: {state: {keys: [{static: {passphrase: x}, slot: 0}]}}"))
	want(t, "machine.systemDiskEncryption.state.keys[0].static: the passphrase of STATE has to be on META, which isn't encrypted: whoever has the disk has it; use nodeID here, and static for other partitions only", warnings)
	kms := "kms: {endpoint: https://kms, ca: " + crt + "}"
	_, warnings = accepted(t, with(document(t, Init), "machine", "systemDiskEncryption: {ephemeral: {keys: [{"+kms+", slot: 0}, {nodeID: {}, slot: 1}]}}"))
	want(t, "machine.systemDiskEncryption.ephemeral.keys[1].nodeID: opens the partition without the key server or the TPM: whoever has the machine has it; leave it out, and have a recovery key, or a static key beside it for other partitions than STATE", warnings)
	_, warnings = accepted(t, strings.Replace(document(t, Worker), "  kubelet:\n", "  kubelet:\n    clusterDNS: [10.0.0.1]\n", 1))
	want(t, "machine.kubelet.clusterDNS[0]: 10.0.0.1 is outside of the service subnets", warnings)
	_, warnings = accepted(t, strings.Replace(document(t, Init), "    cni:\n", "    policies: true\n    cni:\n      name: none\n", 1))
	want(t, "cluster.network.policies: is tested with the CNI flannel only: a network that enforces NetworkPolicies by itself needs no second one for that", warnings)
	_, warnings = accepted(t, strings.Replace(document(t, Init), "type: init", "type: worker", 1))
	if n := strings.Count(warnings, "a worker doesn't need this private key"); n != 6 {
		t.Errorf("%d warnings about keys:\n%s", n, warnings)
	}
	_, all, _ := load(t, full(t))
	if text := strings.Join(all, "\n"); !strings.Contains(text, "cluster.id: has no effect in this release") || strings.Contains(text, "systemDiskEncryption: has no effect") {
		t.Errorf("the warnings are %s", text)
	}
}
