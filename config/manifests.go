package config

import (
	"slices"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/manifest"
)

// CheckManifests finds documents of cluster.inlineManifests that can't be read, in c, which was loaded from data. A
// node runs with them all the same, and shows them, so that an update takes none away: Load doesn't look. Those that
// the configuration before has as well are no reason to refuse another change; nil: there is none. The error is of
// type Problems.
func CheckManifests(name string, data []byte, c, before *Config) error {
	r := &report{name: name}
	for i, m := range c.Cluster.InlineManifests {
		if before != nil && slices.Contains(before.Cluster.InlineManifests, m) {
			continue
		}
		if r.root == nil { // only a few documents have manifests
			if problems, _ := r.parse(data); problems != nil {
				return problems
			}
		}
		where := at("cluster", "inlineManifests", i, "contents")
		n, line, column := r.locate(where)
		_, problems := manifest.Read([]byte(m.Contents))
		for _, p := range problems {
			if resolve(n).Style&yaml.LiteralStyle != 0 { // its lines are those of the document
				r.badNode(&yaml.Node{Line: n.Line + p.Line, Column: 1}, where, "manifest %s: %s", quote(m.Name), p.What)
			} else {
				r.badNode(&yaml.Node{Line: line, Column: column}, where, "manifest %s: %s", quote(m.Name), p)
			}
		}
	}
	if len(r.problems) > 0 {
		return r.problems
	}
	return nil
}
