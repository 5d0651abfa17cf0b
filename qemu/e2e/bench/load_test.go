//go:build e2e

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	budgetP99  = 75 * time.Millisecond
	budgetGate = 40e6 // bytes of memory of apid under the load

	parallelClients = 200
	askedByEach     = 20
	// pace is how often a client asks: as a dashboard does. All at once would measure this machine's processors only.
	pace = 250 * time.Millisecond

	// calm is how long apid may take to give back what the load took.
	calm = 90 * time.Second
	// idleGate is what counts as given back: near what it had before.
	idleGate = 1.25
)

// load lets many clients, each with a connection of its own, read resources at the same
// time, beside one that follows a log and doesn't read.
func load(b *testing.B, c *e2etest.Cluster) {
	b.Helper()
	gate := c.NodeInit(c.Node(), "apid")
	before := pss(b, gate)
	times, during := underLoad(b, c, gate)
	b.Logf("waiting up to %s for apid to calm down", calm)
	after := during
	for start := time.Now(); time.Since(start) < calm && float64(after) > idleGate*float64(before); after = pss(b, gate) {
		<-time.After(time.Second)
	}
	report(b,
		of(milliseconds, fmt.Sprintf("%d clients reading resources, p50", parallelClients), quantile(times, 0.5)),
		of(milliseconds, fmt.Sprintf("%d clients reading resources, p99", parallelClients), quantile(times, 0.99), budgetP99),
		of(megabytes, "apid before the load, proportional set size", before),
		of(megabytes, "apid under the load, proportional set size", max(during, before), budgetGate),
		figure{"apid after the load, proportional set size", megabytes(after), fmt.Sprintf("≤ %.2f × before", idleGate), float64(after) > idleGate*float64(before)})
}

// underLoad is how long each question took, and the most memory that apid had meanwhile.
// All clients are gone when it returns.
func underLoad(b *testing.B, c *e2etest.Cluster, gate int) (times []time.Duration, most int64) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	dial := func() *client.Client {
		one, err := client.Dial(c.Access(), c.Nodes[0].Address.String())
		if err != nil {
			b.Fatal(err)
		}
		return one
	}
	lazy := dial()
	defer lazy.Close()
	stream, err := lazy.Log.Read(ctx, connect.NewRequest(&garboardv1.ReadLogRequest{Id: "kubelet", Follow: true}))
	if err != nil {
		b.Fatal(err)
	}
	defer stream.Close()
	defer cancel() // closing waits for the end otherwise
	clients := make([]*client.Client, parallelClients)
	for i := range clients {
		clients[i] = dial()
		defer clients[i].Close()
	}
	done := make(chan error, 1)
	go func() { done <- askAll(ctx, clients, func(took time.Duration) { times = append(times, took) }) }()
	for tick := time.Tick(pace); ; {
		select {
		case <-tick:
			most = max(most, pss(b, gate))
		case err := <-done:
			if err != nil {
				b.Fatal(err)
			}
			return times, most
		}
	}
}

// askAll has all clients ask, each at its pace, once all are connected.
func askAll(ctx context.Context, clients []*client.Client, took func(time.Duration)) (err error) {
	var connected, all sync.WaitGroup
	var mu sync.Mutex // guards err, and calls of took
	ask := func(c *client.Client, took func(time.Duration)) {
		start := time.Now()
		_, failed := c.Resource.List(ctx, connect.NewRequest(&garboardv1.ListResourcesRequest{Type: "staticpods"}))
		d := time.Since(start)
		mu.Lock()
		defer mu.Unlock()
		err = errors.Join(err, failed)
		took(d)
	}
	connected.Add(len(clients))
	for i, c := range clients {
		all.Go(func() {
			ask(c, func(time.Duration) {}) // connects
			connected.Done()
			connected.Wait()
			// or all would go on asking at the same moments
			<-time.After(pace * time.Duration(i) / time.Duration(len(clients)))
			for range askedByEach {
				ask(c, took)
				<-time.After(pace)
			}
		})
	}
	all.Wait()
	return err
}
