package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/manifest"
	"github.com/garboard-os/garboard/config/tree"
)

// MaxSize is the largest document, in bytes.
const MaxSize = tree.MaxSize

// Load reads a document strictly and fills the defaults in. name is the
// document's name in problems, such as a file name or URL. The error is of type
// Problems and has everything that is wrong; warnings about deprecated
// spellings are returned with it.
func Load(name string, data []byte) (*Config, []Warning, error) {
	return loadWith(name, data, warningChecks)
}

// LoadForContainer is Load for a node in a container. It also warns of what only machines do.
func LoadForContainer(name string, data []byte) (*Config, []Warning, error) {
	return loadWith(name, data, append(slices.Clip(warningChecks), warnContainer))
}

func loadWith(name string, data []byte, warn []check) (*Config, []Warning, error) {
	r := &report{name: name}
	if problems, refused := r.parse(data); refused {
		return nil, nil, problems
	} else if problems != nil {
		return nil, nil, r.truncated(data, problems)
	}
	c := &Config{}
	d := &decoder{report: r, budget: maxExpanded}
	d.document(c)
	if !r.full() && d.budget >= 0 { // otherwise only a part was decoded
		normalize(c, r)
		c.FillDefaults()
		for _, check := range checks {
			check(c, r)
		}
	}
	if len(r.problems) == 0 {
		for _, check := range warn {
			check(c, r)
		}
	}
	slices.SortStableFunc(r.warnings, func(a, b Warning) int { return inOrder(a.Problem, b.Problem) })
	if len(r.problems) > 0 {
		slices.SortStableFunc(r.problems, inOrder)
		if r.full() {
			r.problems = append(r.problems, Problem{Name: name, What: fmt.Sprintf("further problems aren't listed: these are the first %d", maxProblems)})
		}
		return nil, r.warnings, r.truncated(data, r.problems)
	}
	return c, r.warnings, nil
}

// inOrder is the order of the document; of one place, what is missing there comes first.
func inOrder(a, b Problem) int {
	rank := map[bool]int{true: 0, false: 1}
	return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(rank[a.missing], rank[b.missing]))
}

// parse makes the tree of nodes: one document with a mapping at its top. After
// a problem here there is nothing else to check; refused reports that the
// document wasn't parsed at all.
func (r *report) parse(data []byte) (problems Problems, refused bool) {
	doc, err := tree.Parse(data)
	if at := new(tree.Error); errors.As(err, &at) {
		return Problems{{Name: r.name, Line: at.Line, Column: at.Column, What: at.What}}, at.Refused
	}
	r.root = doc.Content[0]
	if r.root.Kind != yaml.MappingNode {
		return Problems{{Name: r.name, Line: r.root.Line, Column: r.root.Column, What: fmt.Sprintf("is %s, not a mapping that starts with version, machine and cluster", kindOf(r.root))}}, false
	}
	return nil, false
}

// truncated makes one problem of all problems of a document that was cut off: a
// list of consequences would hide the cause. A document was probably cut off in
// two cases: it doesn't end with a newline and something is missing or broken
// at its end; or it ends with one, and all problems are about missing things.
func (r *report) truncated(data []byte, problems Problems) error {
	lines := bytes.Count(data, []byte("\n"))
	if !bytes.HasSuffix(data, []byte("\n")) {
		last := Problem{Name: r.name, Line: lines + 1, Column: len(data) - bytes.LastIndexByte(data, '\n')}
		var rest, consequences Problems
		for _, p := range problems {
			if p.missing || p.Line >= last.Line || r.root == nil {
				consequences = append(consequences, p)
			} else {
				rest = append(rest, p)
			}
		}
		if len(consequences) == 0 {
			return problems
		}
		first := consequences[0]
		first.Name = fmt.Sprintf("line %d", first.Line)
		first.Line = 0
		last.What = fmt.Sprintf("ends in the middle of a line, after %d bytes, so it is probably truncated; first consequence: %s", len(data), first)
		return append(rest, last)
	}
	var lacking []string
	for _, p := range problems {
		if p.missing {
			lacking = append(lacking, p.Path)
		}
	}
	if len(lacking) < len(problems) || len(lacking) == 1 {
		return problems
	}
	return Problems{{Name: r.name, Line: lines, Column: 1, What: fmt.Sprintf("ends here without %s: is it truncated?", strings.Join(lacking, ", "))}}
}

// Known is a document of another release without the keys that this release doesn't know, and their places.
func Known(name string, data []byte) (known []byte, unknown []string, err error) {
	doc, err := tree.Parse(data)
	if err != nil {
		return nil, nil, err
	}
	d := &decoder{report: &report{name: name, root: doc.Content[0]}, budget: maxExpanded, unknown: map[*yaml.Node]string{}}
	d.document(&Config{})
	if d.full() || d.budget < 0 {
		return nil, nil, errors.New("it can't be read to its end")
	}
	remove(doc, d.unknown)
	known, err = tree.Text(data, doc)
	return known, slices.Sorted(maps.Values(d.unknown)), err
}

// remove removes pairs from the mappings of a tree.
func remove(n *yaml.Node, keys map[*yaml.Node]string) {
	if n.Kind == yaml.MappingNode {
		var kept []*yaml.Node
		for pair := range slices.Chunk(n.Content, 2) {
			if _, drop := keys[pair[0]]; !drop {
				kept = append(kept, pair...)
			}
		}
		n.Content = kept
	}
	for _, child := range n.Content {
		remove(child, keys)
	}
}

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

// joinAlias is the name of a worker in older files.
const joinAlias = "join"

// loAlias is the name of the loopback interface in some files.
const loAlias, loopback = "lo0", "lo"

// normalize replaces deprecated spellings of values, with a warning each, and the forms of
// MAC addresses, so that the rest of the system knows only one spelling. The decoder handles
// deprecated names of fields (see renamed and lenientLists).
func normalize(c *Config, r *report) {
	if c.Machine.Type == joinAlias {
		r.warn(at("machine", "type"), "%q is an alias; use %q", joinAlias, Worker)
		c.Machine.Type = Worker
	}
	for i := range c.Machine.Network.Interfaces {
		in := &c.Machine.Network.Interfaces[i]
		if in.Name == loAlias {
			r.warn(at("machine", "network", "interfaces", i, "interface"), "%q is an alias; Linux calls it %q", loAlias, loopback)
			in.Name = loopback
		}
		in.HardwareAddr = macAddress(strings.ToLower(strings.ReplaceAll(in.HardwareAddr, "-", ":")))
		members := in.link().Members()
		for j := range members {
			members[j] = macAddress(members[j])
		}
		if in.Bond != nil {
			in.Bond.ADActorSystem = macAddress(in.Bond.ADActorSystem)
		}
		if in.MACVLAN != nil {
			in.MACVLAN.Interface = macAddress(in.MACVLAN.Interface)
		}
	}
}

// macAddress is a MAC address as Linux writes it. Other texts stay.
func macAddress(text string) string {
	if mac, err := net.ParseMAC(text); err == nil {
		return mac.String()
	}
	return text
}
