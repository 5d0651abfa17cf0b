package operationtest

import (
	"errors"
	"sync/atomic"
)

// Restart is a restart of the node between the plan of an operation and its first step: the
// second to fourth look at the cluster fail, because the API server doesn't answer yet.
type Restart struct {
	On    bool
	looks atomic.Int32
}

// Check is called at the beginning of each look.
func (r *Restart) Check() error {
	if n := r.looks.Add(1); r.On && n >= 2 && n <= 4 {
		return errors.New("connection refused")
	}
	return nil
}
