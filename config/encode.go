package config

import (
	"encoding"
	"fmt"
	"reflect"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// indent is that of the documents that are written here, in spaces.
const indent = 2

// Encode writes the document: every field that isn't zero, in the order of the
// types, secrets included. Load reads it back to an equal Config.
func (c *Config) Encode() ([]byte, error) {
	text, err := tree.Encode(encodeValue(reflect.ValueOf(c).Elem(), nil), indent)
	if err != nil {
		return nil, fmt.Errorf("encode configuration: %w", err)
	}
	return text, nil
}

func encodeValue(v reflect.Value, where place) *yaml.Node {
	if text, ok := plainText(v); ok {
		return text
	}
	switch v.Kind() {
	case reflect.Pointer:
		return encodeValue(v.Elem(), where)
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for f, value := range v.Fields() {
			if value.IsZero() {
				continue
			}
			inner := where.with(f.Tag.Get("yaml"))
			key := &yaml.Node{Kind: yaml.ScalarNode, Value: f.Tag.Get("yaml"), HeadComment: tables().Comments[inner.String()]}
			n.Content = append(n.Content, key, encodeValue(value, inner))
		}
		return n
	case reflect.Map:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, key := range keysOf(v, v) {
			n.Content = append(n.Content, tree.Quoted(key.String()), encodeValue(v.MapIndex(key), where.with(key.String())))
		}
		return n
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			n.Content = append(n.Content, encodeValue(v.Index(i), where.with(i)))
		}
		return n
	}
	panic(fmt.Sprintf("config: no way to encode %s", v.Type())) // a test encodes every field
}

// plainText makes the node of a value that is one piece of text in YAML.
func plainText(v reflect.Value) (*yaml.Node, bool) {
	switch x := v.Interface().(type) {
	case Object:
		n, err := x.MarshalYAML()
		if err != nil {
			panic(fmt.Sprintf("config: encode %q: %v", x, err)) // Load has checked it
		}
		return n.(*yaml.Node), true
	case time.Duration:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: duration(x)}, true
	case KeyPEM: // its MarshalText redacts
		return tree.Quoted(encodePEM(x)), true
	case FileMode:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: x.String()}, true
	case Values:
		return tree.Quoted(strings.Join(x, "")), len(x) == 1
	}
	switch {
	case v.Kind() == reflect.String: // Secret, too: its MarshalText redacts
		return tree.Quoted(v.String()), true
	case v.Kind() == reflect.Bool, v.CanInt(), v.CanUint():
		return &yaml.Node{Kind: yaml.ScalarNode, Value: fmt.Sprint(v.Interface())}, true
	}
	if m, ok := v.Interface().(encoding.TextMarshaler); ok && v.Kind() != reflect.Pointer {
		text, err := m.MarshalText()
		if err != nil {
			panic(fmt.Sprintf("config: encode %s: %v", v.Type(), err)) // no type of this package returns an error
		}
		return tree.Quoted(string(text)), true
	}
	return nil, false
}

// duration is d without the zero units that its String has: 5m, not 5m0s.
func duration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
