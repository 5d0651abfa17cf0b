package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/garboard-os/garboard/config/fuzzdata"
)

// costlyDocuments are documents that are designed to be expensive.
func costlyDocuments() map[string]string {
	bomb := "machine:\n  network:\n    nameservers: &a [10.0.0.1" + strings.Repeat(", 10.0.0.1", 5000) + "]\n    interfaces:\n" +
		"      - &i {interface: eth0, bond: {interfaces: &m [a" + strings.Repeat(", a", 5000) + "]}}\n" + strings.Repeat("      - *i\n", 5000)
	return map[string]string{
		"alias bomb in known fields":   bomb,
		"alias bomb in unknown keys":   fuzzdata.Aliases() + "machine: *a20\n",
		"alias to itself":              "machine: &a\n  network: *a\n",
		"deep flow lists":              fuzzdata.Filled("machine: ", "[", "\n"),
		"deep flow mappings":           fuzzdata.Filled("machine: ", "{a: ", "\n"),
		"deep indentation":             fuzzdata.Deep(700),
		"unknown keys":                 fuzzdata.Many(func(i int) string { return fmt.Sprintf("k%06d: 1\n", i) }),
		"the same key":                 fuzzdata.Filled("", "a: 1\n", ""),
		"long key":                     fuzzdata.Filled("", "k", ": 1\n"),
		"long value":                   fuzzdata.Filled("version: ", "v", "\n"),
		"long list":                    fuzzdata.Filled("machine: {certSANs: [a", ",a", "]}\n"),
		"long list of odd names":       fuzzdata.Filled("machine: {certSANs: [a", ",%", "]}\n"),
		"many interfaces":              fuzzdata.Filled("machine: {network: {interfaces: [{interface: a}", ",{interface: a}", "]}}\n"),
		"many files":                   fuzzdata.Filled("machine: {files: [{path: /a}", ",{path: /a}", "]}\n"),
		"many environment variables":   "machine:\n  env:\n" + fuzzdata.Many(func(i int) string { return fmt.Sprintf("    k%06d: 1\n", i) })[:MaxSize-100] + "\n",
		"many podSubnets":              fuzzdata.Filled("cluster: {network: {podSubnets: [10.0.0.0/8", ",10.0.0.0/8", "], serviceSubnets: [10.0.0.0/8]}}\n"),
		"many subnets on both sides":   "cluster: {network: {podSubnets: [10.0.0.0/8" + strings.Repeat(",10.0.0.0/8", 9000) + "], serviceSubnets: [11.0.0.0/8" + strings.Repeat(",11.0.0.0/8", 9000) + "]}}\n",
		"many anchors":                 fuzzdata.Many(func(i int) string { return fmt.Sprintf("k%06d: &k%06d 1\n", i, i) }),
		"many comments":                fuzzdata.Filled("", "# c\n", "machine: {}\n"),
		"many documents":               fuzzdata.Filled("", "---\n", ""),
		"control characters":           fuzzdata.Filled("", "\x01", "\n"),
		"not UTF-8":                    fuzzdata.Filled("a: \"", "\xff", "\"\n"),
		"quotes":                       fuzzdata.Filled("", "'", "\n"),
		"percent":                      fuzzdata.Filled("", "%", "\n"),
		"question marks":               fuzzdata.Filled("", "? ", "\n"),
		"dashes":                       fuzzdata.Filled("", "- ", "\n"),
		"base64 of megabytes in PEM":   fuzzdata.Filled("machine: {ca: {crt: ", "QUFB", "}}\n"),
		"WireGuard peers upon peers":   fuzzdata.Filled("machine: {network: {interfaces: [{interface: w, wireguard: {peers: [{}", ",{}", "]}}]}}\n"),
		"inline manifests by thousand": fuzzdata.Filled("cluster: {inlineManifests: [{name: a}", ",{name: a}", "]}\n"),
	}
}

func TestCostlyDocuments(t *testing.T) {
	for name, doc := range costlyDocuments() {
		t.Run(name, func(t *testing.T) {
			var err error
			cost := fuzzdata.Bounded(t, func() { _, _, err = Load("test.yaml", []byte(doc)) })
			t.Logf("%d bytes cost %.1f", len(doc), cost)
			if err == nil {
				t.Fatal("accepted")
			}
			if n := len(err.Error()); n > 64<<10 {
				t.Errorf("the report has %d bytes", n)
			}
		})
	}
}

func TestAliases(t *testing.T) {
	c, _ := accepted(t, with(with(document(t, Init), "machine", "certSANs: &names [a.example.org]"), "", "\n")+"\n")
	if len(c.Machine.CertSANs) != 1 {
		t.Error(c.Machine.CertSANs)
	}
	doc := with(document(t, Init), "machine", "network: {interfaces: [{interface: eth0, routes: &r [{network: 10.0.0.0/8}]}, {interface: eth1, routes: *r}]}")
	c, _ = accepted(t, doc)
	in := c.Machine.Network.Interfaces
	in[0].Routes[0].Metric = 5
	if in[1].Routes[0].Network != in[0].Routes[0].Network || in[1].Routes[0].Metric == 5 {
		t.Error("an alias shares memory with its anchor")
	}
	got := refused(t, costlyDocuments()["alias bomb in known fields"])
	if !strings.Contains(got, "aliases expand the document to more than 2097152 bytes") {
		t.Error(got)
	}
}

// FuzzLoad: Load ends for any input, and a document that it accepts survives a
// round trip.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(full(f)))
	f.Add([]byte(document(f, Worker)))
	for _, tt := range oneProblem {
		f.Add([]byte(with(document(f, Worker), tt.section, tt.lines)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := Load("fuzz", data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without words")
			}
			return
		}
		if again := roundTrip(t, c); !reflect.DeepEqual(c, again) {
			t.Error("Load(Encode(c)) differs from c")
		}
	})
}

// Any text survives Encode and Load, in every field of free text.
func TestTextRoundTrip(t *testing.T) {
	base, _ := accepted(t, document(t, Init))
	rapid.Check(t, func(t *rapid.T) {
		c := *base
		text := rapid.StringOf(rapid.OneOf(rapid.Rune(), rapid.SampledFrom([]rune(" \n\t:#-'\"|>&*!%@`{}[],?~\\\u0085\u2028\ufeff0x_.")))).
			Filter(func(s string) bool { return !strings.ContainsRune(s, 0) })
		c.Machine.Files = nil
		for i := range rapid.IntRange(0, 3).Draw(t, "files") {
			c.Machine.Files = append(c.Machine.Files, File{
				Path: fmt.Sprintf("/etc/f%d", i), Content: text.Draw(t, "content"), Op: FileCreate, Permissions: FileMode(rapid.IntRange(1, 0o777).Draw(t, "permissions")),
			})
		}
		c.Machine.Env = rapid.MapOfN(rapid.StringMatching(`[A-Za-z_][A-Za-z0-9_]{0,8}`), text, 1, 4).Draw(t, "env")
		c.Machine.Time.BootTimeout = time.Duration(rapid.Int64Range(1, 1<<50).Draw(t, "timeout"))
		c.Machine.Kubelet.ExtraArgs = Args{"v": {text.Draw(t, "arg")}}
		number := rapid.Float64().Filter(func(f float64) bool { return f != 0 }) // YAML loses the sign of a zero
		object, err := json.Marshal(map[string]any{text.Draw(t, "key"): []any{text.Draw(t, "entry"), number.Draw(t, "number"), true, nil}})
		if err != nil {
			t.Fatal(err)
		}
		c.Cluster.APIServer.AdmissionControl = []AdmissionPlugin{{Name: "A", Configuration: Object(object)}}
		var addr [16]byte
		copy(addr[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address"))
		c.Machine.Kubelet.NodeIP.ValidSubnets = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom16(addr), rapid.IntRange(0, 128).Draw(t, "bits"))}
		if again := roundTrip(t, &c); !reflect.DeepEqual(&c, again) {
			t.Fatalf("\n%#v\n%#v", c.Machine.Files, again.Machine.Files)
		}
	})
}

// Only Encode writes secrets.
func TestSecretsDontLeak(t *testing.T) {
	c, _, problems := load(t, full(t))
	if problems != nil {
		t.Fatal(problems)
	}
	s := testSecrets()
	secrets := []string{string(s.MachineToken), string(s.ClusterSecret), encodePEM(s.KubernetesCA.Key), string(s.KubernetesCA.Key), "supersecret", "yAnz5TF+lXXJte14tji3zlMNq"}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c, "token", c.Machine.Token, "key", c.Cluster.CA.Key)
	asJSON, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for how, text := range map[string]string{
		"%v": fmt.Sprintf("%v", *c), "%+v": fmt.Sprintf("%+v", *c), "%#v": fmt.Sprintf("%#v", *c), "%s": fmt.Sprintf("%s %x %q", c.Machine.CA.Key, c.Cluster.CA.Key, c.Cluster.Token),
		"log": log.String(), "JSON": string(asJSON),
	} {
		for i, secret := range secrets {
			if strings.Contains(text, secret) || strings.Contains(text, fmt.Sprintf("%x", secret)) {
				t.Errorf("%s shows secret %d", how, i)
			}
		}
	}
	data, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for i, secret := range secrets {
		if !strings.Contains(string(data), secret) && i != 3 {
			t.Errorf("Encode leaves secret %d out", i)
		}
	}
}

// Problems don't repeat secrets.
func TestProblemsDontLeak(t *testing.T) {
	s := testSecrets()
	doc := document(t, Init)
	for _, tt := range []struct{ old, new string }{
		{string(s.MachineToken), "hunter2"},
		{string(s.MachineToken), "{hunter2: x}"},
		{string(s.ClusterSecret), "hunter2"},
		{encodePEM(s.KubernetesCA.Key), "hunter2"},
		{encodePEM(s.KubernetesCA.Key), "'-----BEGIN hunter2'"},
		{encodePEM(s.KubernetesCA.Key), encodePEM([]byte("-----BEGIN PRIVATE KEY-----\nhunter2+\n-----END PRIVATE KEY-----\n"))},
		{"machine:\n", "machine:\n  network: {interfaces: [{interface: w, wireguard: {privateKey: hunter2}}]}\n"},
		{"machine:\n", "machine:\n  registries: {mirrors: {a: {endpoints: ['ftp://me:hunter2@host']}}}\n"},
		{"https://10.5.0.2:6443", "https://me:hunter2@%zz"},
		{"https://10.5.0.2:6443", "https://me:hunter2@host:1"},
	} {
		got := refused(t, strings.Replace(doc, tt.old, tt.new, 1))
		if got == "" || strings.Contains(got, "hunter2") {
			t.Errorf("%s: %s", tt.new, got)
		}
	}
}

func BenchmarkLoad(b *testing.B) {
	data := []byte(full(b))
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, _, err := Load("x", data); err != nil {
			b.Fatal(err)
		}
	}
}
