package operation

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// maxData is how many values the steps of an operation may leave, and maxValue the
	// size of each in bytes, as JSON: together less than etcd takes in one request
	// (1.5 MiB), with all else that is in a record.
	maxData  = 16
	maxValue = 48 << 10
)

// encode is the form that arguments have in a record: JSON. A message of the API has the names of its fields there, and
// a duration in it is a number of nanoseconds, as other values have it.
func encode(arguments any) ([]byte, error) {
	m, isMessage := arguments.(proto.Message)
	if !isMessage {
		return json.Marshal(arguments)
	}
	text, err := protojson.Marshal(m)
	return rewritten(text, err, func(fields map[string]any) {
		m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if f.Message() != nil { // there are no others than durations
				fields[f.JSONName()] = v.Message().Interface().(*durationpb.Duration).AsDuration()
			}
			return true
		})
	})
}

// Decode reads the arguments of an operation. former are the names that fields of a message have in records of earlier
// releases, with those of today.
func Decode[T any](r Request, former map[string]string) (*T, error) {
	arguments, err := new(T), error(nil)
	if m, isMessage := any(arguments).(proto.Message); isMessage {
		var text []byte
		text, err = rewritten(r.Arguments, nil, func(fields map[string]any) {
			for name, value := range fields {
				if nanoseconds, isNumber := value.(float64); isNumber {
					fields[name] = fmt.Sprintf("%.9fs", nanoseconds/float64(time.Second))
				} else if now, renamed := former[name]; renamed {
					fields[now] = value
				}
			}
		})
		if err == nil {
			err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, m)
		}
	} else {
		err = json.Unmarshal(r.Arguments, arguments)
	}
	if err != nil {
		err = fmt.Errorf("its arguments: %w", err)
	}
	return arguments, err
}

// rewritten is a JSON object after a change of its fields.
func rewritten(text []byte, err error, change func(fields map[string]any)) ([]byte, error) {
	fields := map[string]any{}
	if err = cmp.Or(err, json.Unmarshal(text, &fields)); err != nil {
		return nil, err
	}
	change(fields)
	return json.Marshal(fields)
}

// Data is a value that a step leaves in the record for later steps, also after a restart
// and on another node. It is kept as JSON, and must hold no secrets: the record is on
// STATE, in etcd and in support bundles. Key is unique in the operation.
type Data[T any] struct{ Key string }

// pemKey begins each private key in PEM (RFC 7468).
var pemKey = []byte("PRIVATE KEY-----")

// Put writes the value into the record. When it returns, the value outlives the node.
func (d Data[T]) Put(p *Progress, value T) error {
	text, err := d.encode(value)
	if err != nil {
		return err
	}
	return p.x.commit(func(next *record) ([]Event, error) {
		if _, there := next.Data[d.Key]; !there && len(next.Data) >= maxData {
			return nil, fmt.Errorf("data %s: an operation keeps at most %d values", d.Key, maxData)
		}
		next.Data[d.Key] = text
		return nil, nil
	}, nil)
}

// In puts the value into the record of an operation that is planned.
func (d Data[T]) In(p *Plan, value T) error {
	text, err := d.encode(value)
	if p.data == nil {
		p.data = map[string]json.RawMessage{}
	}
	p.data[d.Key] = text
	return err
}

func (d Data[T]) encode(value T) ([]byte, error) {
	text, err := json.Marshal(value)
	switch {
	case err != nil:
		return nil, fmt.Errorf("data %s: %w", d.Key, err)
	case !nameForm.MatchString(d.Key) || len(text) > maxValue:
		return nil, fmt.Errorf("data %.80q: its key must be like %s, and its value have at most %d bytes, not %d",
			d.Key, nameForm, maxValue, len(text))
	case bytes.Contains(text, pemKey):
		return nil, fmt.Errorf("data %s has a private key: a record must hold no secrets", d.Key)
	}
	return text, nil
}

// ErrNoData is returned for a value that no step has left.
var ErrNoData = errors.New("no step has left it")

// Get reads the value from the record.
func (d Data[T]) Get(p *Progress) (value T, err error) {
	text, there := p.x.record().Data[d.Key]
	if !there {
		return value, fmt.Errorf("data %s: %w", d.Key, ErrNoData)
	}
	if err := json.Unmarshal(text, &value); err != nil {
		return value, fmt.Errorf("data %s: %w", d.Key, err)
	}
	return value, nil
}

// Once has the value of the record, or else keeps the one that is made.
func (d Data[T]) Once(p *Progress, made func() (T, error)) (value T, err error) {
	if value, err = d.Get(p); errors.Is(err, ErrNoData) {
		if value, err = made(); err == nil {
			err = d.Put(p, value)
		}
	}
	return value, err
}

// Then is what a step runs that needs the value.
func (d Data[T]) Then(run func(context.Context, *Progress, T) error) func(context.Context, *Progress) error {
	return func(ctx context.Context, p *Progress) error {
		value, err := d.Get(p)
		if err != nil {
			return err
		}
		return run(ctx, p, value)
	}
}

// InParts completes a step that runs parts, which the value makes, one after another, and undoes them.
func (d Data[T]) InParts(s Step, parts func(T) []Part) Step {
	s.Run = d.Then(func(ctx context.Context, p *Progress, value T) error { return p.Each(ctx, 1, parts(value)...) })
	s.Undo = d.Then(func(ctx context.Context, p *Progress, value T) error { return p.UndoEach(ctx, parts(value)...) })
	return s
}
