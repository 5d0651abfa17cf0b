package apid

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// Bounds of the metrics' own address: a few servers of Prometheus read it.
	maxScrapers   = 32
	maxScraperNew = 16
	maxScrapes    = 8 // of each connection
	// scrapeTimeout is longer than Prometheus waits.
	scrapeTimeout = 30 * time.Second
	// listenEvery is how often the address of the configuration is compared with that of
	// the listener. A node may get the address later than the configuration.
	listenEvery = time.Second
)

// scrapes is the handler behind machine.metrics.address: GET /metrics and nothing else.
type scrapes struct {
	*gate
	open tlsserver.Conns
}

// serveMetrics serves at the address that the state has, until ctx ends.
func (g *gate) serveMetrics(ctx context.Context) {
	reported := ""
	for range sleep.Every(ctx, listenEvery) {
		address := g.State().metrics
		if address == "" {
			continue
		}
		if err := g.listenMetrics(ctx, address); err != nil && err.Error() != reported {
			reported = err.Error()
			g.log.Warn("metrics have no own address: "+reported, "address", address)
		}
	}
}

// listenMetrics serves at an address until the state has another one.
func (g *gate) listenMetrics(ctx context.Context, address string) error {
	port, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &scrapes{gate: g, open: tlsserver.Conns{Max: maxScrapers, MaxNew: maxScraperNew, MaxGuests: maxScrapers}}
	server := &tlsserver.Server{
		Handler: s, Log: g.log, Conns: &s.open, TLS: s.config,
		Read: g.piece, Idle: idleTimeout, Stall: g.stall, MaxHeader: maxHeader, MaxStreams: maxScrapes,
		Tick: func() {
			now := g.State()
			if g.sweep(&s.open, now, now.identifyScraper); now.metrics != address {
				cancel()
			}
		},
	}
	g.log.Info("serves metrics", "address", address)
	return server.Serve(ctx, port)
}

func (s *scrapes) config() (*tls.Config, error) {
	if c := s.State().metricsTLS; c != nil {
		return c, nil
	}
	return nil, errClosed
}

func (s *scrapes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path != api.MetricsPath:
		http.Error(w, "there is only "+api.MetricsPath, http.StatusNotFound)
		return
	case r.Method != http.MethodGet:
		http.Error(w, "there is only GET", http.StatusMethodNotAllowed)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), scrapeTimeout)
	defer cancel()
	r.Body, r.ContentLength = http.NoBody, 0
	now := s.State()
	s.serve(w, r.WithContext(ctx), now, now.identifyScraper)
}

// identifyScraper is identify for the metrics' own address: certificates of
// machine.metrics.clientCA may read metrics, too.
func (s *state) identifyScraper(chain []*x509.Certificate) (identity, error) {
	if s.metrics == "" || len(chain) == 0 {
		return identity{}, errors.New("metrics aren't served here")
	}
	if s.scrapers != nil && verify(chain, s.scrapers) == nil {
		caller := newIdentity(chain[0])
		caller.roles = []string{string(api.Reader)}
		return caller, nil
	}
	return s.identify(chain)
}
