package resolver

import (
	"context"
	"fmt"
	"sync"

	"github.com/miekg/dns"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// Answer is what became of a question to a name server.
type Answer struct {
	Server string // address and port
	Err    error  // nil: it has answered, whatever it knows
}

// Probe asks each of the node's name servers for the root: over UDP as programs do, and over TCP where that has no answer, to tell
// what is wrong. It takes three seconds at most.
func Probe(ctx context.Context, store *resource.Store, cfg *config.Config) []Answer {
	known, _ := learn(store, cfg) // without authorities, a server over TLS isn't believed
	servers := known.ask()
	all := make([]Answer, len(servers))
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() {
			root := question{name: ".", kind: dns.TypeNS}
			_, err := s.exchange(ctx, root)
			if err != nil && s.tls == nil {
				_, stream := s.once(ctx, root, true)
				err = fmt.Errorf("%w; it answers over TCP: %t", err, stream == nil)
			}
			all[i] = Answer{s.address, err}
		})
	}
	wg.Wait()
	return all
}
