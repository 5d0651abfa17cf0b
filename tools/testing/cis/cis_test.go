package cis

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/cis.md anew")

const page = "../../../docs/cis.md"

const head = `# CIS Kubernetes Benchmark

<!-- Made by a test from tools/testing/cis/benchmark.yaml: go test ./tools/testing/cis -update. Don't edit it here. -->

What a node does about each item of the [CIS Kubernetes Benchmark](https://www.cisecurity.org/benchmark/kubernetes) 1.10
(1.9 has the same ones), sections 1, 2, 3.2, 4.1 and 4.2. Tests compare the items with the command lines and the files
that the node's own code makes from a configuration without ` + "`" + `extraArgs` + "`" + `. Other settings may change the result.

- **yes**: a test checks it. **no**: the node does something else, for the given reason. **–**: the item doesn't apply
  to a node without a shell and users.
- *manual*: the benchmark leaves the item to the judgement of a person.
- The other sections, about users, roles, network policies and pods, are about what runs in the cluster.

`

// sections are the titles of the page, by the beginning of the items' numbers.
var sections = []struct{ prefix, title string }{
	{"1.1.", "1.1 Files of control planes"}, {"1.2.", "1.2 API server"}, {"1.3.", "1.3 Controller manager"}, {"1.4.", "1.4 Scheduler"},
	{"2.", "2 etcd"}, {"3.2.", "3.2 Audit log"}, {"4.1.", "4.1 Files of all nodes"}, {"4.2.", "4.2 kubelet"},
}

func render(all []item) string {
	var b strings.Builder
	b.WriteString(head)
	count := map[string]int{}
	for _, i := range all {
		count[i.result()]++
	}
	fmt.Fprintf(&b, "Of %d items, %d are yes, %d no and %d don't apply.\n", len(all), count["yes"], count["no"], count["–"])
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n| item | requirement | met | how, or why not |\n|---|---|---|---|\n", s.title)
		for _, i := range all {
			if !strings.HasPrefix(i.ID, s.prefix) {
				continue
			}
			id, why := i.ID, []string{}
			if i.Manual {
				id += " *manual*"
			}
			if i.Deviation == "" {
				for _, r := range i.Checks {
					why = append(why, r.String())
				}
			}
			text := strings.Join(why, ", ")
			for _, more := range []string{i.Deviation, i.Inapt, i.Note} {
				if more != "" && text != "" {
					text += ". "
				}
				text += more
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", id, i.What, i.result(), text)
		}
	}
	return b.String()
}

func (i item) result() string {
	switch {
	case i.Inapt != "":
		return "–"
	case i.Deviation != "":
		return "no"
	}
	return "yes"
}

func TestPageIsTheTable(t *testing.T) {
	all, err := items()
	if err != nil {
		t.Fatal(err)
	}
	got := render(all)
	if *update {
		if err := os.WriteFile(page, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), go test -update writes it anew:\n%s", page, diff)
	}
}

// last are the last items of each section: none is left out.
var last = map[string]int{"1.1.": 21, "1.2.": 29, "1.3.": 7, "1.4.": 2, "2.": 7, "3.2.": 2, "4.1.": 10, "4.2.": 13}

func TestTableIsWhole(t *testing.T) {
	all, err := items()
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for _, s := range sections {
		for n := 1; n <= last[s.prefix]; n++ {
			if id := fmt.Sprintf("%s%d", s.prefix, n); at >= len(all) || all[at].ID != id {
				t.Fatalf("item %s isn't in its place", id)
			}
			i := all[at]
			if i.What == "" || (len(i.Checks) > 0) != (i.Part != "") || len(i.Checks) == 0 && i.Deviation == "" && i.Inapt == "" || i.Inapt != "" && (len(i.Checks) > 0 || i.Deviation != "") {
				t.Errorf("%s: %+v", i.ID, i)
			}
			at++
		}
	}
	if at != len(all) {
		t.Errorf("%d items, want %d", len(all), at)
	}
}

// Every part has a test that checks it with what a node's own code makes.
func TestEveryPartIsChecked(t *testing.T) {
	call := regexp.MustCompile(`cis\.Check\(t, "([^"]+)"`)
	checked := map[string]bool{}
	err := filepath.WalkDir("../../../services", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range call.FindAllSubmatch(text, -1) {
			checked[string(found[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	all, err := items()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Part != "" && !checked[i.Part] {
			t.Errorf("%s: no test checks the part %q", i.ID, i.Part)
		}
	}
}

func TestRules(t *testing.T) {
	node := Node{
		Commands: map[string][]string{"p": {"p", "--a=1", "--list=x,y", "--off=false"}},
		Files: map[string]File{
			"/f":  {Mode: 0o644, Content: []byte("a: {b: [c, {d: 1}]}")},
			"/g1": {Mode: 0o600}, "/g2": {Mode: 0o400, User: "etcd"},
		},
	}
	for _, tt := range []struct {
		rule  rule
		holds bool
	}{
		{rule{Program: "p", Flag: "a"}, true},
		{rule{Program: "p", Flag: "b"}, false},
		{rule{Program: "q", Flag: "a"}, false},
		{rule{Program: "p", Flag: "a", Unset: true}, false},
		{rule{Program: "p", Flag: "b", Unset: true}, true},
		{rule{Program: "p", Flag: "off", Is: "false"}, true},
		{rule{Program: "p", Flag: "off", Is: "true"}, false},
		{rule{Program: "p", Flag: "b", Is: "false"}, false},
		{rule{Program: "p", Flag: "off", Not: "false"}, false},
		{rule{Program: "p", Flag: "b", Not: "false"}, true},
		{rule{Program: "p", Flag: "list", Has: "y"}, true},
		{rule{Program: "p", Flag: "list", Has: "z"}, false},
		{rule{Program: "p", Flag: "list", Lacks: "y"}, false},
		{rule{Program: "p", Flag: "b", Lacks: "y"}, true},
		{rule{Program: "p", Flag: "a", Min: 1}, true},
		{rule{Program: "p", Flag: "a", Min: 2}, false},
		{rule{Program: "p", Flag: "list", Min: 1}, false},
		{rule{File: "/f", Mode: "0644"}, true},
		{rule{File: "/f", Mode: "0600"}, false},
		{rule{File: "/g*", Mode: "0600"}, true},
		{rule{File: "/g*", Owner: "root"}, false},
		{rule{File: "/g1", Owner: "root"}, true},
		{rule{File: "/g1", Owner: "etcd"}, false},
		{rule{File: "/g2", Owner: "etcd"}, true},
		{rule{File: "/h", Mode: "0777"}, false},
		{rule{File: "/f", Setting: "a.b.1.d", Is: "1"}, true},
		{rule{File: "/f", Setting: "a.b.2"}, false},
		{rule{File: "/f", Setting: "a.x.y", Unset: true}, true},
	} {
		if err := node.check(tt.rule); (err == nil) != tt.holds {
			t.Errorf("%s: %v, want it to hold: %v", tt.rule, err, tt.holds)
		}
	}
}
