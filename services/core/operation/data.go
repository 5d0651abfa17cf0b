package operation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
)

const (
	// maxData is how many values the steps of an operation may leave, and maxValue the
	// size of each in bytes, as JSON: together less than etcd takes in one request
	// (1.5 MiB), with all else that is in a record.
	maxData  = 16
	maxValue = 48 << 10
)

// Decode reads the arguments of an operation.
func Decode[T any](r Request) (arguments T, err error) {
	if err = json.Unmarshal(r.Arguments, &arguments); err != nil {
		err = fmt.Errorf("its arguments: %w", err)
	}
	return arguments, err
}

// Data is a value that a step leaves in the record for later steps, also after a restart
// and on another node. It is kept as JSON, and must hold no secrets: the record is on
// STATE, in etcd and in support bundles. Key is unique in the operation.
type Data[T any] struct{ Key string }

// pemKey begins each private key in PEM (RFC 7468).
var pemKey = []byte("PRIVATE KEY-----")

// Put writes the value into the record. When it returns, the value outlives the node.
func (d Data[T]) Put(p *Progress, value T) error {
	text, err := json.Marshal(value)
	switch {
	case err != nil:
		return fmt.Errorf("data %s: %w", d.Key, err)
	case !nameForm.MatchString(d.Key) || len(text) > maxValue:
		return fmt.Errorf("data %.80q: its key must be like %s, and its value have at most %d bytes, not %d", d.Key, nameForm, maxValue, len(text))
	case bytes.Contains(text, pemKey):
		return fmt.Errorf("data %s has a private key: a record must hold no secrets", d.Key)
	}
	return p.x.commit(func(next *record) ([]Event, error) {
		if _, there := next.Data[d.Key]; !there && len(next.Data) >= maxData {
			return nil, fmt.Errorf("data %s: an operation keeps at most %d values", d.Key, maxData)
		}
		next.Data[d.Key] = text
		return nil, nil
	}, nil)
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
