// Package operationtest is the node and the etcd of the tests of operations on a cluster.
package operationtest

import (
	"context"
	"sync"

	"github.com/garboard-os/garboard/services/core/operation"
)

// Memory is where the records of shared operations are, in place of etcd. No claim is ever
// lost, and the former coordinator counts as gone.
type Memory struct {
	// Node claims; "" is n1.
	Node string

	mu      sync.Mutex // guards records
	records map[string][]byte
}

// Claim implements operation.Shared.
func (s *Memory) Claim(_ context.Context, h operation.Holder) (operation.Claim, error) {
	return claim{s, h.ID}, nil
}

// List implements operation.Shared.
func (s *Memory) List(context.Context) (all []operation.SharedRecord, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, record := range s.records {
		all = append(all, operation.SharedRecord{ID: id, Record: record})
	}
	return all, nil
}

// Delete implements operation.Shared.
func (s *Memory) Delete(context.Context, string) error { return nil }

type claim struct {
	*Memory
	id string
}

func (c claim) Node() string {
	if c.Memory.Node == "" {
		return "n1"
	}
	return c.Memory.Node
}

func (c claim) Read(context.Context) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records[c.id], nil
}

func (c claim) Write(_ context.Context, record []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.records == nil {
		c.records = map[string][]byte{}
	}
	c.records[c.id] = record
	return nil
}

func (c claim) Lost() <-chan struct{} { return nil }

func (c claim) Release(context.Context) error { return nil }
