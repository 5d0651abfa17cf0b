package config

import (
	"errors"
	"maps"
	"slices"

	"github.com/garboard-os/garboard/config/tree"
	"gopkg.in/yaml.v3"
)

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
