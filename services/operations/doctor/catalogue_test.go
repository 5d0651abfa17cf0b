package doctor

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

var update = flag.Bool("update", false, "write the catalogue anew")

const catalogueFile = "../../../docs/troubleshooting.md"

// The catalogue is the table.
func TestCatalogue(t *testing.T) {
	t.Parallel()
	want := catalogue()
	if *update {
		if err := os.WriteFile(catalogueFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(catalogueFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(have)); diff != "" {
		t.Errorf("%s (-want +got), go test -update writes it anew:\n%s", catalogueFile, diff)
	}
}

// titles of the catalogue's rooms, by the checks of their conditions.
var titles = []struct {
	title  string
	checks checks
}{
	{"The machine", machineConditions},
	{"Settings", problemConditions},
	{"The network", networkConditions},
	{"The clock", clockConditions},
	{"Services and images", serviceConditions},
	{"etcd", etcdConditions},
	{"The kubelet", kubeletConditions},
	{"The control plane", controlPlaneConditions},
	{"The shared address", sharedConditions},
	{"The endpoint and certificates", endpointConditions},
	{"The node in Kubernetes", nodeConditions},
	{"The configuration", configurationConditions},
	{"Operations", operationConditions},
}

func catalogue() string {
	var b strings.Builder
	b.WriteString(`# Troubleshooting

` + "`" + `gbctl doctor` + "`" + ` examines a node and reports which of the conditions below hold, the worst first, with the evidence: the
event, the log line, or the answer that shows it. It examines services and their last log lines, controllers, problems
of resources, files, free space, memory, routes, the clock, certificates, etcd, the programs of the control plane, the
cluster's endpoint, name servers, registries, and the status of the node in Kubernetes. It changes nothing, and takes a
few seconds.

- **error**: something doesn't work. **warning**: it works now, but needs a correction. **info**: it passes by itself.
- A consequence of another condition is reported as info, with the name of that condition: solve that one first. A cause
  is as severe as its worst consequence.
- The normal delays of a cluster's first start are also info, until they take too long: the solution says until when.

This page is made from the table and the texts in ` + "`" + `services/operations/doctor` + "`" + `; a test compares them.
`)
	for _, room := range titles {
		fmt.Fprintf(&b, "\n## %s\n", room.title)
		for _, c := range conditions() {
			if room.checks[c.ID] == nil {
				continue
			}
			fmt.Fprintf(&b, "\n### %s\n\n", c.ID)
			fmt.Fprintf(&b, "| | %s |\n|---|---|\n", c.Severity)
			for _, row := range [][2]string{{"Symptom", c.Sees}, {"Cause", c.Why}, {"Solution", c.Next}} {
				fmt.Fprintf(&b, "| %s | %s |\n", row[0], strings.ReplaceAll(row[1], "|", `\|`))
			}
			for _, cause := range c.Causes {
				row := fmt.Sprintf("| With the reason %s | %s |", strings.Join(codes(cause), ", "), strings.TrimSpace(cause.Why+" "+cause.Next))
				if cause.Why+cause.Next != "" {
					fmt.Fprintln(&b, row)
				}
			}
			if len(c.Follows) > 0 {
				fmt.Fprintf(&b, "| Possible consequence of | %s |\n", strings.Join(slices.Compact(slices.Sorted(slices.Values(links(c.Follows)))), ", "))
			}
		}
	}
	return b.String()
}

func codes(c cause) (out []string) {
	for _, code := range c.Codes {
		out = append(out, string(code))
	}
	return out
}

func links(ids []string) []string {
	out := make([]string, 0, len(ids))
	for _, id := range ids {
		out = append(out, fmt.Sprintf("[%s](#%s)", id, id))
	}
	return out
}

func TestTable(t *testing.T) {
	t.Parallel()
	before := map[string]bool{}
	for _, c := range conditions() {
		if before[c.ID] {
			t.Errorf("%s is there twice", c.ID)
		}
		if c.ID == "" || c.severity == 0 || c.Sees == "" || c.Why == "" || c.Next == "" || c.holds == nil {
			t.Errorf("%s lacks something", c.ID)
		}
		for _, id := range c.Follows {
			if !before[id] {
				t.Errorf("%s follows %s, which isn't before it", c.ID, id)
			}
		}
		before[c.ID] = true
	}
	for _, room := range rooms {
		for id := range room {
			if !before[id] {
				t.Errorf("%s isn't in the table", id)
			}
		}
	}
	if len(titles) != len(rooms) {
		t.Errorf("the catalogue has %d rooms, the doctor %d", len(titles), len(rooms))
	}
}

// published are the reasons that the table may name. A code that its package changes is missed in it.
var published = []reason.Code{
	configuration.ConfigurationUnusable, network.LinkMissing, network.NoCarrier, network.DHCPUnanswered, network.AddressTaken, network.NoValidSubnet,
	clock.ServersDisagree, clock.Unconfirmed, clock.Impossible, etcd.DataLost, etcd.Learner, controlplane.ManifestUnavailable,
	containerd.ImageNoSpace, containerd.ImageUnsigned, containerd.RegistryDenied, containerd.RegistryUntrusted, containerd.RegistryUnresolved,
	containerd.RegistryUnanswered, containerd.RegistryNoRoute, containerd.RegistryPlainHTTP, containerd.ImageNotFound, containerd.ImageNameInvalid,
	containerd.RegistryLimits, kubelet.NodeDeleted,
}

func TestReasonsAreKnown(t *testing.T) {
	t.Parallel()
	var named []reason.Code
	for _, c := range conditions() {
		for _, cause := range c.Causes {
			named = append(named, cause.Codes...)
			if len(cause.Codes) == 0 || cause.Why == "" {
				t.Errorf("a cause of %s lacks something", c.ID)
			}
		}
	}
	slices.Sort(named)
	named = slices.Compact(named)
	want := slices.Sorted(slices.Values(published))
	if diff := cmp.Diff(want, named); diff != "" {
		t.Errorf("the reasons of the table (-published +named):\n%s", diff)
	}
}

// A key that the table doesn't know would be left out without a word.
func TestTableHasNoUnknownKeys(t *testing.T) {
	t.Parallel()
	decoder := yaml.NewDecoder(bytes.NewReader(table))
	decoder.KnownFields(true)
	var all []condition
	if err := decoder.Decode(&all); err != nil {
		t.Error(err)
	}
}

// Every condition is provoked in a test.
func TestEveryConditionIsProvoked(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, name := range files {
		if name == "catalogue_test.go" {
			continue
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(data)
	}
	for _, c := range conditions() {
		if !strings.Contains(text.String(), `"`+c.ID+`"`) {
			t.Errorf("no test provokes %s", c.ID)
		}
	}
}

// ends are the words of a text that says what ends a wait, and when.
var ends = regexp.MustCompile(`\b(until|within|before|seconds?|minutes?|hours?)\b`)

// Nobody is told to wait without being told until when.
func TestWaitsHaveAnEnd(t *testing.T) {
	t.Parallel()
	told := func(where, text string) {
		if regexp.MustCompile(`(?i)\b(wait|check again|try again later)\b`).MatchString(text) && !ends.MatchString(text) {
			t.Errorf("%s: %q doesn't say what ends the wait", where, text)
		}
	}
	for _, c := range conditions() {
		told(c.ID, c.Next)
		for _, cause := range c.Causes {
			told(c.ID, cause.Next)
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING && !strings.HasSuffix(name, "_test.go") {
				told(name, lit.Value)
			}
			return true
		})
	}
}
