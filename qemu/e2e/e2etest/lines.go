//go:build e2e

package e2etest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
)

// Received are lines that arrived.
type Received struct {
	mu  sync.Mutex // guards all
	all []string
}

// Count is how many lines have text.
func (r *Received) Count(text string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, line := range r.all {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// Has returns an error unless a line has text.
func (r *Received) Has(text string) error {
	if r.Count(text) == 0 {
		return fmt.Errorf("no line has %s", text)
	}
	return nil
}

// Collect takes lines from all connections. Each one must be a JSON object.
func Collect(t testing.TB, listener net.Listener) *Received {
	t.Helper()
	r := &Received{}
	var done sync.WaitGroup
	conns := make(chan net.Conn, 16)
	done.Go(func() {
		defer close(conns)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed below
			}
			conns <- conn
			done.Go(func() {
				defer conn.Close()
				scan := bufio.NewScanner(conn)
				scan.Buffer(nil, 1<<20)
				for scan.Scan() {
					if !json.Valid(scan.Bytes()) {
						t.Errorf("no JSON: %s", scan.Text())
					}
					r.mu.Lock()
					r.all = append(r.all, scan.Text())
					r.mu.Unlock()
				}
			})
		}
	})
	t.Cleanup(func() {
		if err := listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		for conn := range conns {
			conn.Close()
		}
		done.Wait()
	})
	return r
}
