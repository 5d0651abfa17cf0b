package doctor

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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

// rooms of the catalogue, by the tables that conditions are in.
var rooms = []struct {
	title      string
	conditions []condition
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

` + "`gbctl doctor`" + ` examines a node and reports which of the conditions below hold, the worst first, with the evidence: the event, the log line, or the answer that
shows it. It examines services and their last log lines, controllers, problems of resources, files, free space, memory, routes, the clock, certificates, etcd, the programs of the control plane, the
cluster's endpoint, and the status of the node in Kubernetes. It changes nothing, and takes a few seconds.

- **error**: something doesn't work. **warning**: it works now, but needs a correction. **info**: it passes by itself.
- A consequence of another condition is reported as info, with the name of that condition: solve that one first. A cause is as severe as its worst consequence.
- The normal delays of a cluster's first start are also info, until they take too long.

This page is made from the table and the texts in ` + "`services/operations/doctor`" + `; a test compares them.
`)
	for _, room := range rooms {
		fmt.Fprintf(&b, "\n## %s\n", room.title)
		for _, c := range room.conditions {
			fmt.Fprintf(&b, "\n### %s\n\n", c.id)
			fmt.Fprintf(&b, "| | %s |\n|---|---|\n", strings.ToLower(strings.TrimPrefix(c.severity.String(), "SEVERITY_")))
			own := texts()[c.id]
			for _, row := range [][2]string{{"Symptom", own.Sees}, {"Cause", own.Why}, {"Solution", own.Next}} {
				fmt.Fprintf(&b, "| %s | %s |\n", row[0], strings.ReplaceAll(row[1], "|", `\|`))
			}
			for _, cause := range c.causes {
				row := fmt.Sprintf("| With the reason %s | %s |", strings.Join(codes(cause), ", "), strings.TrimSpace(cause.why+" "+cause.next))
				if cause.why+cause.next != "" {
					fmt.Fprintln(&b, row)
				}
			}
			if len(c.follows) > 0 {
				fmt.Fprintf(&b, "| Possible consequence of | %s |\n", strings.Join(slices.Compact(slices.Sorted(slices.Values(links(c.follows)))), ", "))
			}
		}
	}
	return b.String()
}

func codes(c cause) (out []string) {
	for _, code := range c.codes {
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
	for _, c := range conditions {
		if before[c.id] {
			t.Errorf("%s is there twice", c.id)
		}
		own := texts()[c.id]
		if c.id == "" || c.severity == 0 || own.Sees == "" || own.Why == "" || own.Next == "" || c.holds == nil {
			t.Errorf("%s lacks something", c.id)
		}
		for _, id := range c.follows {
			if !before[id] {
				t.Errorf("%s follows %s, which isn't before it", c.id, id)
			}
		}
		before[c.id] = true
	}
	if len(before) != len(texts()) {
		t.Errorf("%d conditions have %d texts", len(before), len(texts()))
	}
	count := 0
	for _, room := range rooms {
		count += len(room.conditions)
	}
	if count != len(conditions) {
		t.Errorf("the catalogue has %d conditions, the table %d", count, len(conditions))
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
	for _, c := range conditions {
		if !strings.Contains(text.String(), `"`+c.id+`"`) {
			t.Errorf("no test provokes %s", c.id)
		}
	}
}
