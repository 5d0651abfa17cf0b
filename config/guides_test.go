package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// guideExamples are all pieces of configuration in the users' guides, with
// their file below testdata/guides (named after the guide's number) and the
// result of Load: nothing, warnings, or the reason of the refusal. After the
// change that the refusal proposes, the configuration loads.
var guideExamples = []struct {
	file     string
	typ      MachineType
	warnings string
	refusal  string
	fix      func(string) string
	after    string // warnings of the fixed one
}{
	{file: "01-static-addressing.yaml", typ: Worker},
	{file: "01-additional-addresses.yaml", typ: Worker,
		warnings: `machine.network.interfaces[0].interface: "lo0" is an alias; Linux calls it "lo"` + "\n" + `machine.network.interfaces[1].interface: "lo0" is an alias; Linux calls it "lo"`},
	{file: "01-bonding.yaml", typ: Worker},
	{file: "01-vlans.yaml", typ: Worker},
	{file: "02-mirror-of-everything.yaml", typ: Worker,
		refusal: `machine.registries["*"]: unknown key; did you mean machine.registries.mirrors["*"]`,
		fix: func(doc string) string {
			return strings.Replace(doc, "mirrors:\n      '*':", "mirrors:\n        '*':", 1)
		},
		after: `machine.registries.mirrors["*"].endpoints[0]: images come without TLS: whoever is on the way can replace them, unless machine.images.verify demands signatures`},
	{file: "03-certificate-authority.yaml", typ: Worker},
	{file: "04-containerd-metrics.yaml", typ: Worker},
	{file: "05-proxy-authority.yaml", typ: Worker},
	{file: "05-proxy.yaml", typ: Worker},
	{file: "05-name-and-time-servers.yaml", typ: Worker},
	{file: "08-endpoint.yaml", typ: ControlPlane},
	{file: "09-wireguard.yaml", typ: ControlPlane,
		refusal: "network: unknown key; did you mean machine.network",
		fix: func(doc string) string {
			return "machine:\n  " + strings.ReplaceAll(strings.ReplaceAll(strings.TrimRight(doc, "\n"), "\n", "\n  "), "254.14.8172", "254.14:8172") + "\n"
		},
		after: "machine.network.interfaces[0].wireguard.peers: is a list; a single entry is taken for a list of one"},
	{file: "13-encryption.yaml", typ: Worker},
	{file: "13-keys-under-machine.yaml", typ: Worker,
		refusal: "machine.state: unknown key; did you mean machine.systemDiskEncryption.state\nmachine.ephemeral: unknown key; did you mean machine.systemDiskEncryption.ephemeral",
		fix:     encrypted},
	{file: "13-rotation-add.yaml", typ: Worker,
		refusal: "machine.ephemeral: unknown key; did you mean machine.systemDiskEncryption.ephemeral",
		fix:     encrypted,
		after: "machine.systemDiskEncryption.ephemeral.keys[0].static: " + onPlainState + "\nmachine.systemDiskEncryption.ephemeral.keys[0].keySlot: is deprecated; use slot\n" +
			"machine.systemDiskEncryption.ephemeral.keys[1].static: " + onPlainState + "\nmachine.systemDiskEncryption.ephemeral.keys[1].keySlot: is deprecated; use slot"},
	{file: "13-rotation-remove.yaml", typ: Worker,
		refusal: "machine.ephemeral: unknown key; did you mean machine.systemDiskEncryption.ephemeral",
		fix:     encrypted,
		after:   "machine.systemDiskEncryption.ephemeral.keys[0].static: " + onPlainState + "\nmachine.systemDiskEncryption.ephemeral.keys[0].keySlot: is deprecated; use slot"},
	{file: "21-shared-address.yaml", typ: ControlPlane},
	{file: "21-shared-address.yaml", typ: Worker, // S-120
		refusal: "machine.network.interfaces[0].vip: is for control planes; this is a worker",
		fix: func(doc string) string {
			return strings.Replace(doc, "      vip:\n        ip: 192.168.0.15\n", "", 1)
		}},
}

// onPlainState is the warning of a passphrase on a STATE without encryption.
const onPlainState = "the passphrase is on STATE, which isn't encrypted: whoever has the system's disk has it; encrypt STATE as well"

// encrypted moves the lines under machine to machine.systemDiskEncryption.
func encrypted(doc string) string {
	rest := strings.TrimPrefix(doc, "machine:\n")
	return "machine:\n  systemDiskEncryption:\n  " + strings.ReplaceAll(strings.TrimRight(rest, "\n"), "\n", "\n  ") + "\n"
}

// completed is a whole document that contains an example instead of its own
// section of that name.
func completed(t *testing.T, typ MachineType, example string) string {
	t.Helper()
	doc := document(t, typ)
	section, lines := "", ""
	end := func() {
		if section != "" && lines != "" {
			doc = with(doc, section, lines)
		}
	}
	for line := range strings.Lines(example) {
		key, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case line == "\n":
		case line[0] != ' ' && (key == "machine" || key == "cluster"):
			end()
			section, lines = key, ""
		case line[0] != ' ':
			end()
			return doc + example // not a section of ours
		default:
			if strings.HasPrefix(line, "  ") && line[2] != ' ' {
				doc = without(doc, section, key)
			}
			lines += strings.TrimPrefix(line, "  ")
		}
	}
	end()
	return doc
}

func TestGuideExamples(t *testing.T) {
	var tried []string
	for _, tt := range guideExamples {
		t.Run(tt.file+" "+string(tt.typ), func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", "guides", tt.file))
			if err != nil {
				t.Fatal(err)
			}
			doc := completed(t, tt.typ, string(data))
			if tt.refusal == "" {
				_, warnings := accepted(t, doc)
				want(t, tt.warnings, warnings)
				return
			}
			want(t, tt.refusal, refused(t, doc))
			fixed := tt.fix(string(data))
			if fixed == string(data) {
				t.Fatal("the fix changes nothing")
			}
			_, warnings := accepted(t, completed(t, tt.typ, fixed))
			want(t, tt.after, warnings)
		})
		tried = append(tried, tt.file)
	}
	files, err := filepath.Glob("testdata/guides/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if !slices.Contains(tried, filepath.Base(file)) {
			t.Errorf("%s isn't tried", file)
		}
	}
}

// an endpoint with a dot before its port is shown with a colon.
func TestGuideWireGuardEndpoint(t *testing.T) {
	data, err := os.ReadFile("testdata/guides/09-wireguard.yaml")
	if err != nil {
		t.Fatal(err)
	}
	doc := completed(t, ControlPlane, "machine:\n  "+strings.ReplaceAll(strings.TrimRight(string(data), "\n"), "\n", "\n  ")+"\n")
	want(t, `machine.network.interfaces[0].wireguard.peers[0].endpoint: "209.202.254.14.8172" lacks a colon before the port; did you mean 209.202.254.14:8172`, refused(t, doc))
}

// A node gets the settings that the examples show.
func TestGuideExamplesMean(t *testing.T) {
	load := func(file string) *Config {
		data, err := os.ReadFile(filepath.Join("testdata", "guides", file))
		if err != nil {
			t.Fatal(err)
		}
		c, _ := accepted(t, completed(t, ControlPlane, string(data)))
		return c
	}
	var got []string
	for _, l := range load("01-additional-addresses.yaml").Machine.Network.Links() {
		got = append(got, l.Name+" "+l.Addresses[0].String()+" "+l.Addresses[1].String())
	}
	ca := load("03-certificate-authority.yaml").Machine.Files[0]
	got = append(got, ca.Content+ca.Permissions.String()+" "+string(ca.Op)+" "+ca.Path)
	metrics := load("04-containerd-metrics.yaml").Machine.Files[0]
	got = append(got, metrics.Content+metrics.Permissions.String()+" "+string(metrics.Op))
	got = append(got, load("08-endpoint.yaml").Cluster.ControlPlane.Endpoint.String())
	want(t, `lo 192.168.0.21/24 10.2.2.2/24
-----BEGIN CERTIFICATE-----
...
-----END CERTIFICATE-----
0644 append /etc/ssl/certs/ca-certificates
[metrics]
  address = "0.0.0.0:11234"
0644 create
https://endpoint.example.local:6443`, strings.Join(got, "\n"))
}
