package config

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config/fuzzdata"
	"github.com/garboard-os/garboard/config/tree"
)

// Redact runs on any file that is on the disk of a node.
func TestRedactCostlyDocuments(t *testing.T) {
	docs, all := map[string]string{}, costlyDocuments()
	for _, name := range []string{"alias bomb in unknown keys", "long value", "unknown keys", "many comments", "many files", "quotes"} {
		docs[name] = all[name]
	}
	docs["many secrets"] = "a:\n" + fuzzdata.Many(func(int) string { return "- password: x\n" })
	docs["many secrets in one line"] = "a: [" + fuzzdata.Many(func(int) string { return "{password: x}," }) + "{}]\n"
	docs["many aliases of a secret"] = "a: &a x\nb:\n" + fuzzdata.Many(func(int) string { return "- password: *a\n" })
	docs["many secrets in comments"] = "a: 1\n" + fuzzdata.Many(func(int) string { return "# password: x\n" })
	docs["many secrets between values"] = fuzzdata.Many(func(i int) string { return fmt.Sprintf("# token: x\nk%06d: 1\n", i) })
	docs["a long word that names no secret"] = "a: 1 #" + fuzzdata.Many(func(int) string { return "secre" }) + "\n"
	for name, doc := range docs {
		t.Run(name, func(t *testing.T) {
			var text []byte
			var err error
			cost := fuzzdata.Bounded(t, func() { text, err = Redact([]byte(doc)) })
			t.Logf("%d bytes became %d for %.1f: %.80v", len(doc), len(text), cost, err)
		})
	}
}

// The largest configurations that load and differ in all of their entries.
func TestDiffOfLargeConfigurations(t *testing.T) {
	for name, change := range map[string]func(*Config, int){
		"interfaces":    func(c *Config, i int) { c.Machine.Network.Interfaces = make([]Interface, i) },
		"files":         func(c *Config, i int) { c.Machine.Files = make([]File, i) },
		"named files":   func(c *Config, i int) { c.Machine.Files = namedFiles(i, maxEntries) },
		"turned around": func(c *Config, i int) { c.Machine.Files = namedFiles(maxEntries, i) },
	} {
		t.Run(name, func(t *testing.T) {
			var a, b Config
			change(&a, maxEntries)
			change(&b, 1)
			for _, pair := range [][2]*Config{{&a, &b}, {&b, &a}, {&a, &a}} {
				var changes []Change
				cost := fuzzdata.Bounded(t, func() { changes = Diff(pair[0], pair[1]) })
				t.Logf("%d changes for %.1f", len(changes), cost)
			}
		})
	}
}

// namedFiles are files with ascending or descending numbers as names.
func namedFiles(from, to int) []File {
	var files []File
	step := 1
	if from > to {
		step = -1
	}
	for i := from; i != to; i += step {
		files = append(files, File{Path: "/" + strings.Repeat("x", i%50) + string(rune('a'+i%26)), Content: "x"})
	}
	return files
}

// FuzzRedact: the result is a document without secrets, and to redact it again
// changes nothing.
func FuzzRedact(f *testing.F) {
	f.Add([]byte(full(f)))
	f.Add([]byte("note: &a hunter2\nmachine:\n  token: *a # token: x\n"))
	f.Add([]byte("a: |\n  # key: x\n\nb: >-\n  x\n\n  y\n# password: z\n"))
	for _, tt := range oneProblem {
		f.Add([]byte(with(document(f, Worker), tt.section, tt.lines)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		text, err := Redact(data)
		if err != nil {
			return
		}
		again, err := Redact(text)
		if err != nil || !bytes.Equal(again, text) {
			t.Errorf("%q became %q, then %q, %v", data, text, again, err)
		}
		c, _, err := Load("fuzz", data)
		if err != nil {
			return
		}
		for _, secret := range []Secret{c.Machine.Token, c.Cluster.Token, c.Cluster.Secret} {
			if len(secret) > 8 && strings.Contains(string(text), string(secret)) && !strings.Contains(strings.Replace(string(data), string(secret), "", 1), string(secret)) {
				t.Errorf("%q is in %q", string(secret), text)
			}
		}
	})
}

// FuzzDiff: a configuration doesn't differ from itself, and a field removed in
// one direction is added in the other.
func FuzzDiff(f *testing.F) {
	base := document(f, Worker)
	f.Add([]byte(full(f)), []byte(document(f, ControlPlane)))
	for _, tt := range oneProblem {
		f.Add([]byte(base), []byte(with(base, tt.section, tt.lines)))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		old, _, err := Load("old", a)
		if err != nil {
			return
		}
		if changes := Diff(old, old); changes != nil {
			t.Errorf("differs from itself: %v", changes)
		}
		new, _, err := Load("new", b)
		if err != nil {
			return
		}
		there, back := Diff(old, new), Diff(new, old)
		if len(there) != len(back) {
			t.Errorf("%d changes there, %d back:\n%v\n%v", len(there), len(back), there, back)
		}
		for _, c := range there {
			if c.Effect == "" || c.Path == "" || c.Old == c.New && c.Old != redacted {
				t.Errorf("change %+v", c)
			}
		}
		Effects(there)
	})
}

// FuzzText: an unchanged tree is written without changes.
func FuzzText(f *testing.F) {
	f.Add([]byte(full(f)))
	f.Add([]byte("a:\n- b # c\n\n- - d\n  - e\n#f\ng: &h |\n  i\n\nj: *h"))
	f.Fuzz(func(t *testing.T, data []byte) {
		doc, err := tree.Parse(data)
		if err != nil {
			return
		}
		if text, err := tree.Text(data, doc); err == nil && !bytes.Equal(bytes.TrimRight(text, "\n"), bytes.TrimRight(data, "\n")) {
			if again, err := tree.Parse(text); err != nil || !tree.Equal(doc, again) {
				t.Errorf("%q became %q", data, text)
			}
		}
	})
}
