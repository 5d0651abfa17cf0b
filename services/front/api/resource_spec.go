package api

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
	"github.com/garboard-os/garboard/services/core/resource"
	"gopkg.in/yaml.v3"
)

const (
	// specIndent is the indentation of a spec.
	specIndent = 4
	// hidden stands for what isn't shown, as the types of package config have it.
	hidden = "(secret)"
)

// maxShown bounds how many objects' texts are kept; a control plane has about
// fifty, of two hundred kilobytes in all. Those of objects that are gone go when
// it is reached.
const maxShown = 512

// shown keeps what was made of objects for their readers: two hundred at once ask
// for the same, and making it takes longer than sending it.
type shown struct {
	mu      sync.Mutex // guards objects
	objects map[resourceName]*shownObject
}

type resourceName struct{ typ, namespace, id string }

// shownObject is made of a spec once.
type shownObject struct {
	spec    any
	once    sync.Once
	text    string
	columns []string
	err     error
}

// of is an object as its readers see it: YAML, and the columns of a table.
func (s *shown) of(d resource.Definition, o resource.Object[any]) (text string, columns []string, err error) {
	c := s.object(o)
	c.once.Do(func() {
		// should this panic
		c.err = fmt.Errorf("show %s %s/%s: a defect of the node: it is in the log %q", o.Type, o.Namespace, o.ID, LogID)
		for _, column := range d.Columns {
			value := ""
			if column.From == "" {
				value = cell(column, o.Spec)
			}
			c.columns = append(c.columns, value)
		}
		c.text, c.err = specYAML(o)
	})
	return c.text, c.columns, c.err
}

// cell is a column's value as its readers see it.
func cell(c resource.Column, spec any) string {
	value := readable(c.Value(spec))
	if privateKey(value) {
		return hidden
	}
	return value
}

// object is what is kept for an object, or is going to be. Specs don't change in
// place, so comparing one with itself is quick.
func (s *shown) object(o resource.Object[any]) *shownObject {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := resourceName{o.Type, o.Namespace, o.ID}
	if c := s.objects[name]; c != nil && reflect.DeepEqual(c.spec, o.Spec) {
		return c
	}
	if s.objects == nil || len(s.objects) >= maxShown {
		s.objects = make(map[resourceName]*shownObject)
	}
	c := &shownObject{spec: o.Spec}
	s.objects[name] = c
	return c
}

// specYAML is an object's spec as readers of the API get it. Secrets hide
// themselves by their types; two kinds of them have none, and are looked for
// here: those of Kubernetes objects, and private keys in any text.
func specYAML(o resource.Object[any]) (string, error) {
	node, err := specNode(o.Spec)
	if err != nil {
		return "", fmt.Errorf("show %s %s/%s: %w", o.Type, o.Namespace, o.ID, err)
	}
	hide(node)
	text, err := tree.Encode(node, specIndent)
	if err != nil {
		return "", fmt.Errorf("show %s %s/%s: %w", o.Type, o.Namespace, o.ID, err)
	}
	return string(text), nil
}

func specNode(spec any) (*yaml.Node, error) {
	node := new(yaml.Node)
	if c, ok := spec.(*config.Config); ok && c != nil {
		// As the document has it: without all the fields that aren't set.
		text, err := c.Encode()
		if err != nil {
			return nil, err
		}
		if text, err = config.Redact(text); err != nil {
			return nil, err
		}
		if err := yaml.Unmarshal(text, node); err != nil {
			return nil, err
		}
		return tree.Plain(node), nil // comments are for people who edit the document
	}
	return node, node.Encode(spec)
}

// hide replaces private keys. What Secrets of Kubernetes hold, their type hides.
func hide(n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && privateKey(n.Value) {
		n.SetString(hidden)
	}
	for _, inner := range n.Content {
		hide(inner)
	}
}

const (
	pemBegin = "-----BEGIN "
	pemKey   = "PRIVATE KEY-----"
)

// base64PEM is base64 of PEM, in lines or not.
var base64PEM = regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/ \t\n\r]*`)

// privateKey reports whether a text has a private key, as PEM or as base64 of it.
func privateKey(text string) bool {
	if strings.Contains(text, pemBegin) && strings.Contains(text, pemKey) {
		return true
	}
	return slices.ContainsFunc(base64PEM.FindAllString(text, -1), func(found string) bool {
		// What was decoded up to an error counts: words may follow the PEM.
		decoded, _ := base64.RawStdEncoding.DecodeString(strings.Join(strings.Fields(found), ""))
		return bytes.Contains(decoded, []byte(pemKey))
	})
}
