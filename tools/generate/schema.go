package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
)

// The schema is JSON Schema, draft 7, which all editors know. It is written out
// from the fields without a library: what is to be said of a value is in its own
// tables, because Go's types know nothing of it, and what remains is properties
// and items.

// node is a schema. Its fields are in the order in which people read them.
type node struct {
	Schema      string     `json:"$schema,omitempty"`
	ID          string     `json:"$id,omitempty"`
	Title       string     `json:"title,omitempty"`
	Description string     `json:"description,omitempty"`
	Type        any        `json:"type,omitempty"` // a name, or several
	Enum        []any      `json:"enum,omitempty"`
	Pattern     string     `json:"pattern,omitempty"`
	Minimum     *int64     `json:"minimum,omitempty"`
	Maximum     *int64     `json:"maximum,omitempty"`
	Default     any        `json:"default,omitempty"`
	Examples    []any      `json:"examples,omitempty"`
	Deprecated  bool       `json:"deprecated,omitempty"`
	Required    []string   `json:"required,omitempty"`
	Properties  properties `json:"properties,omitempty"`
	Additional  any        `json:"additionalProperties,omitempty"` // false, or a schema
	Items       *node      `json:"items,omitempty"`
	AnyOf       []*node    `json:"anyOf,omitempty"`
}

// properties are in the order of the document, which a Go map would lose.
type properties []property

type property struct {
	name string
	node *node
}

func (ps properties) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, p := range ps {
		if i > 0 {
			b.WriteByte(',')
		}
		inner, err := json.Marshal(p.node)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "%q:%s", p.name, inner)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

func schemaOf(words comments) ([]byte, error) {
	root := object(words, config.Fields())
	root.Schema = "http://json-schema.org/draft-07/schema#"
	root.ID = "https://garboard.dev/schema/v1alpha1.json"
	root.Title = "Garboard machine configuration, " + config.Version
	text, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}

// object is the schema of a struct.
func object(words comments, fields []config.Field) *node {
	n := &node{Type: "object", Additional: false}
	for _, f := range fields {
		inner := fieldNode(words, f)
		name := f.Path[strings.LastIndexByte(f.Path, '.')+1:]
		n.Properties = append(n.Properties, property{name, inner})
		for _, old := range f.Deprecated {
			copied := *inner
			copied.Deprecated, copied.Description = true, "Deprecated; use "+name+"."
			n.Properties = append(n.Properties, property{old, &copied})
		}
		// A former name is as good, so none of the names alone is required.
		needed := words.required(f) || f.Type.Kind() == reflect.Struct && len(inner.Required) > 0
		if needed && len(f.Deprecated) == 0 {
			n.Required = append(n.Required, name)
		}
	}
	return n
}

func fieldNode(words comments, f config.Field) *node {
	var n *node
	if len(f.Fields) > 0 {
		n = object(words, f.Fields)
		switch f.Type.Kind() {
		case reflect.Slice:
			n = &node{Type: or("array", "null"), Items: n}
			if singles[f.Path] {
				n = &node{AnyOf: []*node{n, n.Items}}
			}
		case reflect.Map:
			n = &node{Type: or("object", "null"), Additional: n}
		default:
			if len(n.Required) == 0 {
				n.Type = or("object", "null")
			}
		}
	} else {
		n = leafNode(f)
	}
	n.Description = words.of(f)
	if f.Effect != "" {
		n.Description = strings.TrimSpace(n.Description + " [change: " + effectWords(f) + "]")
	}
	if f.Default != "" && n.Type != nil {
		n.Default = defaultValue(f)
	}
	return n
}

func or(names ...string) []string { return names }

// singles are lists for which a single entry may stand.
var singles = map[string]bool{"machine.network.interfaces[].wireguard.peers": true}

func defaultValue(f config.Field) any {
	switch t := structOf(f.Type); {
	case f.Type.Kind() == reflect.Slice:
		return strings.Split(f.Default, ", ")
	case t.Kind() == reflect.Bool:
		return f.Default == "true"
	case t.Kind() == reflect.Int || t.Kind() == reflect.Uint32 && t != reflect.TypeFor[config.FileMode]():
		return json.Number(f.Default)
	}
	return f.Default
}

func effectWords(f config.Field) string {
	words := string(f.Effect)
	if id, ok := f.Effect.Service(); ok {
		words = "restarts " + id
	}
	if f.Note != "" {
		words += "; " + f.Note
	}
	return words
}

// leafNode is the schema of a field without fields of its own. Numbers stand for
// text wherever text is wanted: tokens and versions look like them.
func leafNode(f config.Field) *node {
	if n, ok := valueNodes[f.Path]; ok {
		return &n
	}
	t := f.Type
	switch {
	case t.Kind() == reflect.Slice && valueTypes[t].Type == nil:
		inner := typeNode(t.Elem())
		return &node{Type: or("array", "null"), Items: inner}
	case t.Kind() == reflect.Map && valueTypes[t].Type == nil:
		return &node{Type: or("object", "null"), Additional: typeNode(t.Elem())}
	case t.Kind() == reflect.Pointer && t.Elem().Kind() == reflect.Struct:
		return &node{Type: "object", Additional: false}
	}
	n := typeNode(t)
	for _, choice := range f.Choices {
		n.Enum = append(n.Enum, choice)
	}
	if t.Kind() == reflect.Uint32 && n.Type == "integer" {
		n.Minimum, n.Maximum = new(int64(0)), new(int64(math.MaxUint32))
	}
	if bounds, ok := limits[f.Path]; ok || f.Max != 0 {
		n.Minimum, n.Maximum = new(cmp.Or(bounds[0], f.Min)), new(cmp.Or(bounds[1], f.Max))
	}
	return n
}

func typeNode(t reflect.Type) *node {
	if n, ok := valueTypes[t]; ok {
		return &n
	}
	switch t.Kind() {
	case reflect.Pointer:
		return typeNode(t.Elem())
	case reflect.Bool:
		return &node{Type: "boolean"}
	case reflect.String:
		return &node{Type: or("string", "number")}
	}
	return &node{Type: "integer"}
}

const addressPattern = `[0-9a-fA-F.:]+(%[A-Za-z0-9._-]+)?`

// valueTypes are the forms of the types that read themselves.
var valueTypes = map[reflect.Type]node{
	reflect.TypeFor[netip.Addr]():            {Type: "string", Pattern: "^" + addressPattern + "$"},
	reflect.TypeFor[netip.Prefix]():          {Type: "string", Pattern: "^[0-9a-fA-F.:]+/[0-9]{1,3}$"},
	reflect.TypeFor[time.Duration]():         {Type: "string", Pattern: `^(0|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$`, Examples: []any{"30s", "5m"}},
	reflect.TypeFor[config.URL]():            {Type: "string", Pattern: "^[A-Za-z][A-Za-z0-9+.-]*://[^/]"},
	reflect.TypeFor[config.PEM]():            {Type: "string", Pattern: `^[A-Za-z0-9+/\s]+=*\s*$`},
	reflect.TypeFor[config.KeyPEM]():         {Type: "string", Pattern: `^[A-Za-z0-9+/\s]+=*\s*$`},
	reflect.TypeFor[config.FileMode]():       {Type: or("string", "integer"), Pattern: "^(0o)?[0-7]{1,4}$", Examples: []any{"0644", "0600"}},
	reflect.TypeFor[config.Advertisements](): {Type: or("boolean", "string"), Enum: []any{true, false}},
	reflect.TypeFor[config.Object]():         {Type: or("object", "null")},
	// Arguments, labels and the like are text to us, but look like anything to YAML.
	reflect.TypeFor[config.Args]():       arguments,
	reflect.TypeFor[config.Env]():        texts,
	reflect.TypeFor[map[string]string](): texts,
	reflect.TypeFor[config.Taint]():      {Type: "string", Pattern: `^([^:]*:)?(NoSchedule|PreferNoSchedule|NoExecute)$`},
}

const (
	tokenPattern = "^[a-z0-9]{6}[.][a-z0-9]{16}$"
	key32Pattern = "^[A-Za-z0-9+/]{43}=$" // base64 of 32 bytes
	namePattern  = "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
)

// valueNodes are the forms of single fields, as checks hold them to.
var valueNodes = map[string]node{
	"machine.token":            {Type: or("string", "number"), Pattern: tokenPattern},
	"cluster.token":            {Type: or("string", "number"), Pattern: tokenPattern},
	"cluster.secret":           {Type: "string", Pattern: key32Pattern},
	"cluster.clusterName":      {Type: or("string", "number"), Pattern: namePattern},
	"machine.network.hostname": {Type: or("string", "number"), Pattern: namePattern},
	"machine.install.disk":     {Type: "string", Pattern: "^/dev/."},
	"machine.files[].path":     {Type: "string", Pattern: "^/"},
	"machine.network.interfaces[].wireguard.privateKey":        {Type: "string", Pattern: key32Pattern},
	"machine.network.interfaces[].wireguard.peers[].publicKey": {Type: "string", Pattern: key32Pattern},
}

var texts = node{Type: or("object", "null"), Additional: &node{Type: or("string", "number", "boolean", "null")}}

// arguments are texts, and lists of them for flags that may be repeated.
var arguments = node{Type: or("object", "null"), Additional: &node{
	Type: or("string", "number", "boolean", "null", "array"), Items: texts.Additional.(*node),
}}

// limits are the bounds of numbers that no rule of a value has (config/fields.yaml).
var limits = map[string][2]int64{
	"machine.network.rules[].table":               {1, math.MaxUint32},
	"machine.network.interfaces[].bond.miimon":    {1, math.MaxInt32},
	"machine.network.interfaces[].bond.updelay":   {0, math.MaxInt32},
	"machine.network.interfaces[].bond.downdelay": {0, math.MaxInt32},
}
