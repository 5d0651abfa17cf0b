// Package kspp compares what a node has with what the Kernel Self Protection Project recommends, and makes
// docs/hardening.md.
package kspp

import (
	"bytes"
	"cmp"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
)

var update = flag.Bool("update", false, "write docs/hardening.md anew")

const page = "../../../docs/hardening.md"

//go:embed recommended.yaml
var table []byte

//go:embed head.md
var head string

// recommended are the rows of the project's recommendations.
type recommended struct {
	Arguments, Parameters, Config []row
}

type row struct {
	Name  string `yaml:"name"`
	Value string `yaml:"value"` // of an argument or a parameter
	Want  string `yaml:"want"`  // of an option of the kernel's configuration
	Has   string `yaml:"has"`   // what Debian's kernel has; "": that
	Met   bool   `yaml:"met"`   // in another way, which the reason says
	Why   string `yaml:"why"`
}

// debian is why an option is open that has no other reason.
const debian = "The kernel is Debian's."

func rows(t *testing.T) recommended {
	t.Helper()
	var all recommended
	d := yaml.NewDecoder(bytes.NewReader(table))
	d.KnownFields(true)
	if err := d.Decode(&all); err != nil {
		t.Fatal(err)
	}
	if len(all.Arguments) < 10 || len(all.Parameters) < 20 || len(all.Config) < 90 {
		t.Fatalf("only %d + %d + %d rows", len(all.Arguments), len(all.Parameters), len(all.Config))
	}
	return all
}

// ours is the node's setting of a name; nil: it has none.
func ours(settings []boot.Setting, name string) *boot.Setting {
	for i := range settings {
		if settings[i].Name == name {
			return &settings[i]
		}
	}
	return nil
}

func met(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// named is a setting as users write it.
func named(name, value string) string {
	if strings.Contains(name, "/") {
		return strings.ReplaceAll(name, "/", ".") + " = " + value
	}
	return boot.Param{Key: name, Value: value}.String()
}

func render(t *testing.T, all recommended) string {
	var b strings.Builder
	b.WriteString(head)
	for _, part := range []struct {
		title    string
		settings []boot.Setting
	}{{"Kernel arguments", boot.HardeningArguments}, {"Kernel parameters", boot.HardeningParameters}} {
		fmt.Fprintf(&b, "\n### %s\n\n| setting | why |\n|---|---|\n", part.title)
		for _, s := range part.settings {
			fmt.Fprintf(&b, "| `%s` | %s |\n", named(s.Name, s.Value), s.Why)
		}
	}
	b.WriteString("\n## What KSPP recommends\n\n" + `The rows are those of the project's [recommended settings](https://kspp.github.io/Recommended_Settings) for x86-64 and
GCC. **yes** may have been reached in another way, which the last column names. The configuration is that of Debian's
package ` + "`" + `linux-image-6.12.118+deb13-amd64` + "`" + `. What is **no** there stays open as long as the node has Debian's kernel: it
is signed by Debian, gets Debian's security updates, and its modules load only into it. A [customized
system](customization.md) can have another one.
`)
	settings := func(title string, rows []row, have []boot.Setting) {
		fmt.Fprintf(&b, "\n### %s\n\n| recommended | met | how, or why not |\n|---|---|---|\n", title)
		for _, r := range rows {
			s := ours(have, r.Name)
			same := s != nil && s.Value == r.Value
			if same == (r.Why != "") {
				t.Errorf("%s=%s: the node has %+v, and the reason is %q", r.Name, r.Value, s, r.Why)
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", named(r.Name, r.Value), met(same || r.Met), cmp.Or(r.Why, "See above."))
		}
	}
	settings("Arguments", all.Arguments, boot.HardeningArguments)
	settings("Parameters", all.Parameters, boot.HardeningParameters)
	fmt.Fprintf(&b, "\n### Configuration of the kernel\n\n| recommended | Debian | met | how, or why not |\n|---|---|---|---|\n")
	for _, r := range all.Config {
		differs := r.Has != "" && r.Has != r.Want
		if r.Met && (!differs || r.Why == "") || !differs && r.Why != "" {
			t.Errorf("%+v", r)
		}
		why := r.Why
		if differs {
			why = cmp.Or(why, debian)
		}
		fmt.Fprintf(&b, "| `%s=%s` | %s | %s | %s |\n", r.Name, r.Want, cmp.Or(r.Has, r.Want), met(!differs || r.Met), why)
	}
	return b.String()
}

func TestPageIsTheTable(t *testing.T) {
	got := render(t, rows(t))
	if *update {
		if err := os.WriteFile(page, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), go test -update writes it anew:\n%s", page, diff)
	}
}

// Each setting has a reason, and is set once.
func TestTablesAreSound(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range append(append([]boot.Setting{}, boot.HardeningArguments...), boot.HardeningParameters...) {
		if s.Name == "" || s.Why == "" || seen[s.Name] {
			t.Errorf("%+v", s)
		}
		seen[s.Name] = true
	}
}
