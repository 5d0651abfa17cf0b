package patch

import (
	"bytes"
	"encoding/json"
	"slices"

	"gopkg.in/yaml.v3"
)

// encode writes a node as JSON, with the keys in their order.
func encode(n *yaml.Node) []byte {
	var b bytes.Buffer
	encodeInto(&b, n)
	return b.Bytes()
}

func encodeInto(b *bytes.Buffer, n *yaml.Node) {
	switch n.Kind {
	case yaml.MappingNode:
		b.WriteByte('{')
		for i := 0; i+1 < len(n.Content); i += 2 {
			if i > 0 {
				b.WriteByte(',')
			}
			encodeScalar(b, n.Content[i].Value)
			b.WriteByte(':')
			encodeInto(b, n.Content[i+1])
		}
		b.WriteByte('}')
	case yaml.SequenceNode:
		b.WriteByte('[')
		for i, inner := range n.Content {
			if i > 0 {
				b.WriteByte(',')
			}
			encodeInto(b, inner)
		}
		b.WriteByte(']')
	default:
		encodeScalar(b, scalarOf(n))
	}
}

func encodeScalar(b *bytes.Buffer, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		panic("patch: a scalar that JSON can't hold: " + err.Error()) // it is nil, bool, json.Number or string
	}
	b.Write(text)
}

// scalarOf is the value of a scalar as encoding/json would return it. A value
// that is a number in YAML, but isn't spelled like a number of JSON, is text:
// permissions (0644) and tokens (123456.0123456789012345) must keep every digit.
func scalarOf(n *yaml.Node) any {
	switch n.ShortTag() {
	case "!!null":
		return nil
	case "!!bool":
		var v bool
		if n.Decode(&v) == nil {
			return v
		}
	case "!!int", "!!float":
		if json.Valid([]byte(n.Value)) {
			return json.Number(n.Value)
		}
	}
	return n.Value
}

// object is a JSON object with its keys in order.
type object struct {
	keys   []string
	values map[string]any
}

// decode reads JSON with objects in order and numbers as they are written.
func decode(text []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	return decodeValue(dec)
}

func decodeValue(dec *json.Decoder) (any, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		o := &object{values: map[string]any{}}
		for dec.More() {
			key, err := dec.Token()
			if err != nil {
				return nil, err
			}
			v, err := decodeValue(dec)
			if err != nil {
				return nil, err
			}
			name := key.(string)
			if _, twice := o.values[name]; !twice {
				o.keys = append(o.keys, name)
			}
			o.values[name] = v
		}
		_, err := dec.Token()
		return o, err
	case json.Delim('['):
		list := []any{}
		for dec.More() {
			v, err := decodeValue(dec)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err := dec.Token()
		return slices.Clip(list), err
	}
	return token, nil
}
