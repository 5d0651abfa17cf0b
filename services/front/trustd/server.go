package trustd

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	limit "golang.org/x/time/rate"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// maxConns and maxNew bound connections: a node has one, for a moment.
	maxConns = 200
	maxNew   = 128
	// maxCalls bounds what is looked at at once: a call takes a millisecond.
	maxCalls = 64
	// maxBody is the largest message: a token, a request, and a proof.
	maxBody = 8<<10 + pki.MaxProof
	// maxHeader is more than the headers of client libraries need.
	maxHeader = 8 << 10
	// maxStreams is for each connection.
	maxStreams = 4
	// callTimeout is for a whole request, its answer, and for what follows it: all of
	// it fits into a few segments of TCP.
	callTimeout = 10 * time.Second
	// signTimeout is what PID 1 gets, which asks etcd. Nodes wait for a little longer.
	signTimeout = 8 * time.Second
	// refusedTimeout is for the rest of a request that isn't read: it comes with the
	// header, or in the next segment. It holds a connection for as long.
	refusedTimeout = time.Second
)

// facts are what PID 1 writes for trustd: its own certificate and key, PEM.
type facts struct {
	Cert []byte `json:"cert"`
	Key  []byte `json:"key"`
}

// server bounds who asks, and has PID 1 decide and sign.
type server struct {
	watcher statefile.Watcher[facts, tls.Config] // its Poll is for Tick only
	log     *slog.Logger
	conns   tlsserver.Conns
	calls   atomic.Int32
	limits  limits
	errors  *connect.ErrorWriter
	now     func() time.Time
	sign    func(ctx context.Context, msg *apiv1.SignRequest, peer netip.Addr) (certificate []byte, err error)
}

func newServer(dir, socket string, log *slog.Logger) (*server, error) {
	s := &server{
		log: tlsserver.Limited(log), conns: tlsserver.Conns{Max: maxConns, MaxNew: maxNew}, errors: connect.NewErrorWriter(),
		now: time.Now, sign: asking(socket),
	}
	s.watcher = statefile.Watcher[facts, tls.Config]{Dir: dir, Use: s.use}
	return s, s.watcher.Next()
}

// use is what trustd makes of the facts that PID 1 has written.
func (s *server) use(f facts) (*tls.Config, error) {
	cert, err := tls.X509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate of trustd: %w", err)
	}
	s.log.Info("ready")
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"},
		SessionTicketsDisabled: true, // a client connects once
	}, nil
}

func (s *server) listener() *tlsserver.Server {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewTrustServiceHandler(s, connect.WithReadMaxBytes(maxBody)))
	return &tlsserver.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.bounded(mux, w, r) }),
		Log:     s.log, Conns: &s.conns, TLS: func() (*tls.Config, error) { return s.watcher.State(), nil },
		Read: callTimeout, Idle: callTimeout, Stall: callTimeout,
		MaxHeader: maxHeader, MaxStreams: maxStreams,
		Tick: func() { s.watcher.Poll(s.log) },
	}
}

// bounded admits a call. It checks the limit of the caller's address first, then reads
// the body, which may come slowly, and only then counts the call as one of maxCalls. So
// clients that send slowly use connections, as many as their address may, but don't block
// other clients' calls.
func (s *server) bounded(next http.Handler, w http.ResponseWriter, r *http.Request) {
	peer, err := peerOf(r.RemoteAddr)
	if err != nil {
		s.reject(w, r, s.refuse(connect.CodeInternal, r.RemoteAddr, err))
		return
	}
	if wait, ok := s.limits.take(peer, s.now()); !ok {
		s.reject(w, r, s.refuse(connect.CodeResourceExhausted, peer.String(), fmt.Errorf("%s asks too often; try again in %s", peer, wait.Round(time.Second))))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		s.reject(w, r, notWhole(err))
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	defer s.calls.Add(-1)
	if s.calls.Add(1) > maxCalls {
		s.reject(w, r, connect.NewError(connect.CodeResourceExhausted, errors.New("too many calls at once; try again later")))
		return
	}
	// An error means that there is no such deadline: HTTP/2 has Stall.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(callTimeout))
	next.ServeHTTP(w, r)
}

func notWhole(err error) error {
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the request has more than %d bytes", tooLarge.Limit))
	}
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the request didn't come whole: %w", err))
}

// reject answers a call with an error, and doesn't wait for the rest of its body.
func (s *server) reject(w http.ResponseWriter, r *http.Request, why error) {
	// Errors here mean that the caller is gone.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(refusedTimeout))
	_ = s.errors.Write(w, r, why)
}

// peerOf is the address of a caller, by what net/http calls it.
func peerOf(remote string) (netip.Addr, error) {
	from, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Addr{}, errNoPeer
	}
	return from.Addr().Unmap().WithZone(""), nil
}

// Sign implements garboardv1connect.TrustServiceHandler.
func (s *server) Sign(ctx context.Context, r *connect.Request[apiv1.SignRequest]) (*connect.Response[apiv1.SignResponse], error) {
	peer, err := peerOf(r.Peer().Addr)
	if err != nil {
		return nil, s.refuse(connect.CodeInternal, r.Peer().Addr, err)
	}
	// PID 1 knows the tokens, and reads proofs. It isn't asked where there is neither.
	if !config.IsToken(r.Msg.GetToken()) && len(r.Msg.GetProof()) == 0 {
		return nil, s.refuse(connect.CodeUnauthenticated, peer.String(), errToken) // of the request, nothing is told
	}
	cert, err := s.sign(ctx, r.Msg, peer)
	if refused := new(connect.Error); errors.As(err, &refused) {
		return nil, s.refuse(refused.Code(), peer.String(), errors.New(refused.Message()))
	}
	if err != nil {
		return nil, s.refuse(connect.CodeInternal, peer.String(), err)
	}
	if signed, err := pki.ParseCert(cert); err == nil {
		s.log.Info("signed", "name", signed.Subject.CommonName, "for", peer.String())
	}
	return connect.NewResponse(&apiv1.SignResponse{Certificate: cert}), nil
}

func (s *server) refuse(code connect.Code, from string, why error) error {
	s.log.Warn("refused", "from", from, "why", why.Error())
	return connect.NewError(code, why)
}

// rate is how often something may be done: burst times at once, and then once per
// every.
type rate struct {
	burst int
	every time.Duration
}

var (
	// perAddress: a node needs one certificate at its start. Without one it asks again every
	// five seconds (askAgain in services/kubernetes/secrets), which is within the rate.
	perAddress = rate{10, 5 * time.Second}
	// perSite is for all IPv6 addresses of a site: a LAN of nodes that start at once,
	// or one host with many addresses. Slow calls of a site (callTimeout at most) use
	// a quarter of maxConns at most, so that other sites get connections.
	perSite = rate{32, 500 * time.Millisecond}
)

const (
	// siteBits: a LAN, and what one host may have of addresses (RFC 4291 §2.5.1).
	siteBits = 64
	// maxBuckets bounds what is remembered: more addresses than a network has nodes
	// that come at the same time.
	maxBuckets = 1024
)

// limits is how often each address may ask, and each site.
type limits struct {
	mu      sync.Mutex // guards buckets
	buckets map[netip.Prefix]*bucket
}

// bucket is full when it isn't there.
type bucket struct {
	*limit.Limiter
	used time.Time
}

// take reports whether addr may send a request now, or else after which time. A refused
// request of an address doesn't count for its site.
func (l *limits) take(addr netip.Addr, now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.bucket(netip.PrefixFrom(addr, addr.BitLen()), perAddress, now)
	if wait = own.wait(now); wait > 0 {
		return wait, false
	}
	if addr.Is6() {
		site := l.bucket(netip.PrefixFrom(addr, siteBits).Masked(), perSite, now)
		if wait = site.wait(now); wait > 0 {
			return wait, false
		}
		site.AllowN(now, 1)
	}
	return 0, own.AllowN(now, 1)
}

// bucket is the one of a prefix, as it is now. The caller holds mu.
func (l *limits) bucket(of netip.Prefix, r rate, now time.Time) *bucket {
	b := l.buckets[of]
	if b == nil {
		b = l.add(of, r, now)
	}
	b.SetLimitAt(now, b.Limit()) // it counts from now on, also after the clock was set back
	b.used = now
	return b
}

// wait is how long a request has to wait for its turn: a second at least, or not at all.
func (b *bucket) wait(now time.Time) time.Duration {
	missing := 1 - b.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	return max(time.Duration(missing/float64(b.Limit())*float64(time.Second)), time.Second)
}

// add makes a bucket, if need be in place of the one that was used longest ago. The
// caller holds mu.
func (l *limits) add(of netip.Prefix, r rate, now time.Time) *bucket {
	if len(l.buckets) >= maxBuckets {
		var oldest netip.Prefix
		for other, b := range l.buckets {
			if !oldest.IsValid() || b.used.Before(l.buckets[oldest].used) {
				oldest = other
			}
		}
		delete(l.buckets, oldest)
	}
	if l.buckets == nil {
		l.buckets = make(map[netip.Prefix]*bucket)
	}
	b := &bucket{Limiter: limit.NewLimiter(limit.Every(r.every), r.burst)}
	l.buckets[of] = b
	return b
}
