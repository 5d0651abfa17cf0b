package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What is wrong with a document of a manifest is found with the line in the configuration. kubectl's documents are
// right.
func TestManifestsAreChecked(t *testing.T) {
	t.Parallel()
	const head = "\n  inlineManifests:\n"
	for name, tc := range map[string]struct {
		text string
		want []string // after the line where inlineManifests is
	}{
		"kubectl's": {head + `
    - name: ingress-tcp
      contents: |
        apiVersion: v1
        kind: ConfigMap
        metadata: {name: tcp-services, day: 2024-05-01}
        data:
          9000: "default/echo:8080"
          on: yes
    - name: comments
      contents: "# nothing\n"
`, nil},
		"wrong": {head + `    - name: first
      contents: |
        # comment
        ---
        kind: ConfigMap
        metadata: {name: a}
        ---
        apiVersion: v1
        kind: ConfigMap
        metadata:
          generateName: a-
        --
        apiVersion: v1
    - name: second
      contents: "kind: A\nkind: B\n"
    - name: third
      contents: >
        apiVersion: v1

        kind: A
`, []string{
			`+5 cluster.inlineManifests[0].contents: manifest "first": ConfigMap a: apiVersion is missing, or no text`,
			`+12 cluster.inlineManifests[0].contents: manifest "first": "--" separates no documents, as "---" does; not valid YAML: could not find expected ':'`,
			`+15 cluster.inlineManifests[1].contents: manifest "second": line 2: not valid YAML: key "kind" already set in map`,
			`+17 cluster.inlineManifests[2].contents: manifest "third": line 1: A: metadata.name is missing, or no text`,
		}},
	} {
		text := strings.TrimSuffix(document(t, Init), "\n") + tc.text
		c, _, err := Load("a.yaml", []byte(text))
		if err != nil {
			t.Fatalf("%s: a node must run with it: %v", name, err)
		}
		base := strings.Count(text[:strings.Index(text, "inlineManifests")], "\n") + 1
		var got []string
		problems, _ := CheckManifests("a.yaml", []byte(text), c, nil).(Problems)
		for _, p := range problems {
			got = append(got, fmt.Sprintf("+%d %s", p.Line-base, Problem{Path: p.Path, What: p.What}))
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if err := CheckManifests("a.yaml", []byte(text), c, c); err != nil {
			t.Errorf("%s: another change is refused for what was there before: %v", name, err)
		}
	}
}
