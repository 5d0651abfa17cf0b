package main

import (
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// document converts the answer of a node for -o yaml and -o json: the fields of the
// message in their order, below "node". Numbers are numbers, durations are as Go writes
// them, times are RFC 3339 in UTC. A field without a value has its zero value, so that
// every document has the same structure; only unknown times are missing.
func document(node string, m proto.Message) *yaml.Node {
	n := mapping("node", node)
	n.Content = append(n.Content, fields(m.ProtoReflect()).Content...)
	return n
}

func fields(m protoreflect.Message) *yaml.Node {
	n := mapping()
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		if f.Kind() == protoreflect.MessageKind && !f.IsList() && !f.IsMap() && !m.Has(f) {
			continue
		}
		n.Content = append(n.Content, scalar(f.JSONName()), field(f, m.Get(f)))
	}
	return n
}

func field(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch {
	case f.IsList():
		items := make([]*yaml.Node, v.List().Len())
		for i := range items {
			items[i] = value(f, v.List().Get(i))
		}
		return sequence(items)
	case f.IsMap():
		plain := map[string]any{} // yaml.v3 sorts the keys
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			plain[k.String()] = v.Interface()
			return true
		})
		return scalar(plain)
	}
	return value(f, v)
}

func value(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch f.Kind() {
	case protoreflect.MessageKind:
		switch m := v.Message().Interface().(type) {
		case *timestamppb.Timestamp:
			return scalar(m.AsTime().Format(time.RFC3339Nano))
		case *durationpb.Duration:
			return scalar(m.AsDuration().String())
		}
		return fields(v.Message())
	case protoreflect.EnumKind:
		return scalar(enumName(f.Enum(), v.Enum()))
	case protoreflect.BytesKind:
		return scalar(base64.StdEncoding.EncodeToString(v.Bytes()))
	}
	return scalar(v.Interface())
}

// word is a value of an enumeration as users read it.
func word(value fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(value.String(), prefix), "_", "-"))
}

func enumName(e protoreflect.EnumDescriptor, number protoreflect.EnumNumber) any {
	if d := e.Values().ByNumber(number); d != nil {
		return string(d.Name())
	}
	return int32(number)
}
