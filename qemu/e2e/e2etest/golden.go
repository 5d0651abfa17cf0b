//go:build e2e

package e2etest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// Golden compares what a user saw with testdata/NAME.txt. Lines about what was tried again,
// and about the progress of a pull, aren't in it; addresses, IDs and times are replaced.
func (c *Cluster) Golden(name, text string) {
	c.t.Helper()
	path, got := filepath.Join("testdata", name+".txt"), c.constant(text)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			c.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			c.t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		c.t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

// passingLine matches lines that depend on the speed of the machine.
var passingLine = regexp.MustCompile(`(?m)^.*(retrying error: |: \d+ of \d+ MB$).*\n`)

// varying are the parts of lines that vary.
var varying = []struct {
	part *regexp.Regexp
	by   string
}{
	{regexp.MustCompile(`\b([a-z][a-z0-9-]*)-[a-z2-7]{8}\b`), "$1-ID"},
	{regexp.MustCompile(`\d+\.\d s\b`), "N s"},
	{regexp.MustCompile(`from \d+\.\d+\.\d+\.\d+:\d+`), "from 10.5.0.1:PORT"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?( UTC)?`), "TIME"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d`), "DATE"},
	{regexp.MustCompile(`\b[0-9a-f]{64}\b`), "DIGEST"},
}

// constant replaces what varies between two runs.
func (c *Cluster) constant(text string) string {
	text = passingLine.ReplaceAllString(text, "")
	for _, v := range varying {
		text = v.part.ReplaceAllString(text, v.by)
	}
	for i, n := range c.Nodes {
		text = strings.ReplaceAll(text, n.Name, strings.TrimPrefix(n.Name, c.Name+"-"))
		text = regexp.MustCompile(`\b`+regexp.QuoteMeta(n.Address.String())+`\b`).ReplaceAllString(text, fmt.Sprintf("10.5.0.%d", i+2))
	}
	return text
}
