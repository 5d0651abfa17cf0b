package api

import (
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// BenchmarkResourcesFor200Clients has 200 clients read the resources of a control
// plane at once, over one connection as the gate has it. The budget is 100 ms at
// the 99th percentile.
func BenchmarkResourcesFor200Clients(b *testing.B) {
	const clients = 200
	r := newRig(b)
	r.controlPlane()
	r.serve()
	for name, typ := range map[string]string{"config": "mc", "static pods": "staticpods", "manifests": "manifests"} {
		b.Run(name, func(b *testing.B) {
			client := r.resources(reader)
			var mu sync.Mutex // guards took
			var took []time.Duration
			for b.Loop() {
				var wg sync.WaitGroup
				for range clients {
					wg.Go(func() {
						began := time.Now()
						_, err := client.List(b.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: typ}))
						mu.Lock()
						defer mu.Unlock()
						took = append(took, time.Since(began))
						if err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)*99/100].Milliseconds()), "p99-ms")
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(len(took)), "µs/call")
		})
	}
}
