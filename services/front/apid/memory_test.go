//go:build e2e

// This runs with the end-to-end tests, because they run without the race detector, which
// takes ten times the memory.

package apid

import (
	"crypto/tls"
	"fmt"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	memoryUnder = 40e6 // with loadClients
	// memoryBack is how much more than before the first client may stay: pages of
	// the program that were touched for the first time.
	memoryBack = 8 << 20
)

// The gate's memory: little when idle, within its budget under 200 clients of whom
// some follow a log that they don't read, and little again when they are gone.
func TestMemoryUnderLoad(t *testing.T) {
	p := startProgram(t)
	before := p.pss(t)
	var stuck []*tls.Conn
	for range 20 {
		conn, err := tls.Dial("tcp", p.b.address, clientTLS(admin(t, p.ca)))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET /v1/logs/kubelet?follow=true HTTP/1.1\r\nHost: n1\r\n\r\n")
		stuck = append(stuck, conn)
	}
	most := 0
	done := make(chan []time.Duration)
	go func() { done <- p.load(t, loadClients, 20) }()
	watch := time.NewTicker(20 * time.Millisecond)
	defer watch.Stop()
	var took []time.Duration
	for took == nil {
		select {
		case took = <-done:
		case <-watch.C:
			most = max(most, p.pss(t))
		}
	}
	for _, conn := range stuck {
		conn.Close()
	}
	t.Logf("proportional set size: %.1f MB idle, %.1f MB with %d clients", mb(before), mb(most), loadClients)
	if most > memoryUnder {
		t.Errorf("%.1f MB, of at most %.1f", mb(most), mb(memoryUnder))
	}
	if len(took) != loadClients*19 {
		t.Errorf("%d calls were answered", len(took))
	}
	after := 0
	eventually.That(t, 30*time.Second, "the gate to give its memory back", func() error {
		if after = p.pss(t); after > before+memoryBack {
			return fmt.Errorf("%.1f MB, was %.1f", mb(after), mb(before))
		}
		return nil
	})
	t.Logf("%.1f MB afterwards", mb(after))
}
