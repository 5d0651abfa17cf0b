package apid

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// maxConns bounds all connections: with HTTP/2 a client needs one.
	maxConns = 400
	// maxNew bounds connections before the first request; two hundred clients may
	// connect at once.
	maxNew = 256
	// maxGuests bounds connections of guests, which use memory also without calls.
	maxGuests = 224
	// maxBody is the largest request but for those that bring a configuration: that has 1 MiB,
	// in base64 as JSON has it, and what is around it. PID 1 reads them whole.
	maxBody   = 128 << 10
	maxConfig = 2 << 20
	// unaryTimeout ends a call that PID 1 doesn't answer: applying a configuration
	// restarts services, which takes the longest.
	unaryTimeout = 5 * time.Minute
	// machineHost is the host in requests to PID 1, which ignores it.
	machineHost = "machine"
)

// gate is the handler behind TLS.
type gate struct {
	watcher statefile.Watcher[facts, state] // its Poll is for tick only
	log     *slog.Logger
	admins  *quotas
	guests  *quotas
	errors  *connect.ErrorWriter
	proxy   *httputil.ReverseProxy
	backend *http.Transport
	open    tlsserver.Conns
	piece   time.Duration    // readTimeout; a field for tests
	stall   time.Duration    // stallTimeout; a field for tests
	now     func() time.Time // a node's clock may be wrong; a field for tests
}

// time is what certificates are compared with. One that has expired doesn't come back when
// the clock goes back.
func (g *gate) time() time.Time {
	return slices.MaxFunc([]time.Time{g.now(), g.State().floor}, time.Time.Compare)
}

// newGate is a gate with the state in dir that forwards calls to socket.
func newGate(dir, socket string, log *slog.Logger) (*gate, error) {
	g := &gate{
		log: tlsserver.Limited(log), errors: connect.NewErrorWriter(),
		backend: newBackend(socket), admins: newQuotas(adminRooms), guests: newQuotas(guestRooms),
		open:  tlsserver.Conns{Max: maxConns, MaxNew: maxNew, MaxGuests: maxGuests},
		piece: readTimeout, stall: stallTimeout, now: time.Now,
	}
	g.proxy = g.newProxy()
	g.watcher = statefile.Watcher[facts, state]{Dir: dir, Use: g.use}
	return g, g.watcher.Next()
}

// use is what the gate makes of the facts that PID 1 has written.
func (g *gate) use(f facts) (*state, error) {
	s, err := newState(f)
	if err == nil {
		g.log.Info("ready", "mode", s.mode)
	}
	return s, err
}

// State is the state in use.
func (g *gate) State() *state { return g.watcher.State() }

// call is what the gate found out about a request.
type call struct {
	caller identity
	admin  bool // an administrator, or a node of the cluster; others are guests
	mode   string
	remote string
	client *client
}

type callKey struct{}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	r.URL.Path = api.Current(r.URL.Path) // from here on, all is about the procedure of this release
	s := g.State()
	g.serve(w, r, s, s.identify)
}

// serve answers a call of the client that identify finds.
func (g *gate) serve(w http.ResponseWriter, r *http.Request, s *state, identify identifier) {
	c, m, refused := g.decide(r, s, identify)
	leave, err := g.enter(r.Context(), &c)
	if err != nil {
		g.failed(w, r, err)
		return
	}
	defer leave()
	if refused == nil {
		leave, err := g.takeBody(w, r, c, m)
		if err != nil {
			g.failed(w, r, err)
			return
		}
		defer leave()
	}
	ctx := context.WithValue(r.Context(), callKey{}, c)
	if !m.Streaming {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, unaryTimeout)
		defer cancel()
	}
	if !c.admin {
		end, err := c.client.turn(ctx, m.Streaming && refused == nil)
		if err != nil {
			g.failed(w, r, err)
			return
		}
		defer end()
	}
	if refused != nil {
		g.refuse(r, c.caller, refused)
		g.failed(w, r, refused)
		return
	}
	out := newSteady(w, g.stall)
	if !c.admin && m.Streaming {
		out.pace = func(bytes int) { _ = c.client.sent.WaitN(ctx, bytes) } // an error is that ctx has ended
	}
	g.proxy.ServeHTTP(out, r.WithContext(ctx))
}

// enter takes room for a call.
func (g *gate) enter(ctx context.Context, c *call) (leave func(), err error) {
	q, name := g.admins, ""
	if !c.admin {
		q, name = g.guests, c.caller.name+"\x00"+strings.Join(c.caller.roles, ",")
		if c.caller.name == "" {
			name, _, _ = net.SplitHostPort(c.remote)
		}
		tlsserver.Of(ctx).SetGuest(name)
	}
	if c.client, err = q.enter(name); err != nil {
		return nil, err
	}
	return func() { c.client.leave(callRoom) }, nil
}

// takeBody bounds the body of a request. Of guests, it is read before PID 1 hears of the call;
// only configurations, which strangers bring in maintenance mode, are too large for that.
func (g *gate) takeBody(w http.ResponseWriter, r *http.Request, c call, m api.Method) (leave func(), err error) {
	most, leave := int64(maxBody), func() {}
	config := m.Procedure == garboardv1connect.ConfigServiceApplyProcedure
	switch {
	case m.Upload > 0:
		most = m.Upload
	case config:
		if err := c.client.take(configRoom); err != nil {
			return nil, err
		}
		most, leave = maxConfig, func() { c.client.leave(configRoom) }
	case !c.admin:
		most = guestBody
	}
	if r.ContentLength > most {
		leave()
		return nil, exhausted("the request has %d bytes, of at most %d", r.ContentLength, most)
	}
	r.Body = http.MaxBytesReader(w, r.Body, most)
	switch {
	case m.Upload > 0:
		r.Body = newUpload(w, r.Body, g.piece)
	case !c.admin && !config:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	return leave, nil
}

// decide identifies the caller, and returns an error if the call isn't allowed.
func (g *gate) decide(r *http.Request, s *state, identify identifier) (c call, m api.Method, refused *connect.Error) {
	c = call{mode: s.mode, remote: r.RemoteAddr}
	if s.mode == modeClosed {
		return c, m, connect.NewError(connect.CodeUnavailable, errClosed)
	}
	// With the current authorities, which may be newer than the connection.
	caller, err := s.recall(tlsserver.Of(r.Context()), r.TLS.PeerCertificates, identify)
	if err == nil {
		c.caller, err = caller, caller.current(g.time())
	}
	if err != nil {
		return c, m, connect.NewError(connect.CodeUnauthenticated, err)
	}
	c.admin = slices.Contains(caller.roles, string(api.Admin)) || slices.Contains(caller.roles, string(api.Peer))
	m, known := lookup(r)
	switch {
	case s.mode == api.ModeMaintenance && known && m.Maintenance, s.mode == api.ModeLocked && known && m.Locked:
	case s.mode == api.ModeLocked:
		err = fmt.Errorf("%s isn't there while no key of the machine opens its disk; unlock it first (gbctl -n ADDRESS unlock --insecure)", printablePath(r))
	case s.mode == api.ModeMaintenance:
		err = fmt.Errorf("%s isn't there in maintenance mode: the node has no configuration yet; apply one first", printablePath(r))
	case !known: // clients of the next release look for these words (api.Former)
		err = fmt.Errorf("no role may call %s %s", printable(r.Method), printablePath(r))
	case !api.Allowed(m, caller.roles):
		has := "none"
		if len(caller.roles) > 0 {
			has = strings.Join(caller.roles, ", ")
		}
		err = fmt.Errorf("%s needs the role %s; client certificate %q has %s", m.Procedure, m.Role, caller.name, has)
	}
	if err != nil {
		return c, m, connect.NewError(connect.CodePermissionDenied, err)
	}
	return c, m, nil
}

// refuse tells PID 1 of a call that is refused, for the audit log.
func (g *gate) refuse(r *http.Request, caller identity, why *connect.Error) {
	g.log.Warn("refused", "who", caller.name, "from", r.RemoteAddr, "method", printablePath(r), "why", why.Message())
	if why.Code() == connect.CodeUnavailable {
		return // the node has no caller yet that could be known
	}
	told, _ := json.Marshal(api.Refusal{Peer: caller.name, Remote: r.RemoteAddr, Roles: caller.roles, Procedure: printablePath(r), Code: why.Code(), Why: why.Message()})
	if err := g.tell(r.Context(), told); err != nil {
		g.log.Warn("the audit log lacks a call that was refused", "err", err.Error())
	}
}

func (g *gate) tell(ctx context.Context, refusal []byte) error {
	// The caller may be gone already, which must not hide the call.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+machineHost+api.Refusals, bytes.NewReader(refusal))
	if err != nil {
		return err
	}
	answer, err := g.backend.RoundTrip(r)
	if err == nil {
		answer.Body.Close()
	}
	return err
}

// lookup finds the method that a request is for. The path that is looked at here
// is the one that is handed on, and PID 1 must not read it as another one.
func lookup(r *http.Request) (api.Method, bool) {
	p := r.URL.Path
	if path.Clean(p) != p || strings.ContainsFunc(p, func(c rune) bool { return c < ' ' || c > '~' }) {
		return api.Method{}, false
	}
	m, known := api.Lookup(p)
	logs := strings.HasPrefix(p, api.LogsPath)
	switch {
	case !known,
		logs && r.Method != http.MethodGet,
		r.Method != http.MethodGet && r.Method != http.MethodPost:
		return api.Method{}, false
	}
	return m, true
}

func printablePath(r *http.Request) string {
	const most = 128 // the longest procedure has half of that
	p := r.URL.EscapedPath()
	return p[:min(len(p), most)]
}

// passed are the headers that are forwarded. Clients can't set those by which the gate
// reports the caller to PID 1.
var passed = []string{
	"Accept", "Accept-Encoding", "Content-Type", "Content-Encoding", "User-Agent",
	"Connect-Protocol-Version", "Connect-Timeout-Ms", "Connect-Content-Encoding", "Connect-Accept-Encoding",
	"Grpc-Timeout", "Grpc-Encoding", "Grpc-Accept-Encoding",
}

func (g *gate) newProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     g.backend,
		FlushInterval: -1, // streams are to arrive as they come
		ErrorHandler:  g.failed,
		ErrorLog:      log.New(tlsserver.Writer{Log: g.log}, "", 0),
		BufferPool:    &buffers{sync.Pool{New: func() any { return new([bufferSize]byte) }}},
	}
}

// rewrite makes the request to PID 1.
func rewrite(p *httputil.ProxyRequest) {
	in, out := p.In, p.Out
	c, _ := in.Context().Value(callKey{}).(call)
	out.URL = &url.URL{Scheme: "http", Host: machineHost, Path: in.URL.Path, RawQuery: out.URL.RawQuery}
	out.Host = machineHost
	out.Trailer = nil
	out.Header = make(http.Header, len(passed))
	for _, name := range passed {
		if values := in.Header[name]; len(values) > 0 {
			out.Header[name] = values
		}
	}
	if strings.Contains(in.Header.Get("Te"), "trailers") {
		out.Header.Set("Te", "trailers") // gRPC insists
	}
	out.Header.Set(api.HeaderMode, c.mode)
	out.Header.Set(api.HeaderPeer, c.caller.name)
	out.Header.Set(api.HeaderRoles, strings.Join(c.caller.roles, ","))
	out.Header.Set(api.HeaderRemote, c.remote)
}

// exhausted is the error of a call for which there is no room.
func exhausted(format string, args ...any) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf(format, args...))
}

// failed answers a request that got no answer, in the protocol of the caller.
func (g *gate) failed(w http.ResponseWriter, r *http.Request, err error) {
	var tooLarge *http.MaxBytesError
	var dial *net.OpError
	var own *connect.Error
	code, why := connect.CodeUnavailable, errors.New("the node gave no answer to this call; try again")
	switch {
	case errors.As(err, &own):
		code, why = own.Code(), own.Unwrap()
	case errors.As(err, &tooLarge):
		code, why = connect.CodeResourceExhausted, fmt.Errorf("the request has more than %d bytes", tooLarge.Limit)
	case errors.Is(err, context.DeadlineExceeded):
		code, why = connect.CodeDeadlineExceeded, fmt.Errorf("the node didn't answer within %s", unaryTimeout)
	case errors.Is(err, context.Canceled):
		code, why = connect.CodeCanceled, errors.New("the caller is gone")
	case errors.As(err, &dial) && dial.Op == "dial":
		g.log.Warn("the node's own side of the API doesn't answer", "err", err.Error())
		why = errors.New("the node's API isn't there now: it starts or stops; try again")
	case errors.Is(err, os.ErrDeadlineExceeded):
		code, why = connect.CodeDeadlineExceeded, fmt.Errorf("the rest of the request didn't come: nothing in %s", g.piece)
	default:
		g.log.Warn("hand on a call", "method", printablePath(r), "err", err.Error())
	}
	// An error here means that the caller is gone.
	_ = g.errors.Write(w, r, connect.NewError(code, why))
}

// buffers are what answers go through. ReverseProxy's own have 32 KiB.
type buffers struct{ pool sync.Pool }

const bufferSize = 8 << 10

func (b *buffers) Get() []byte { return b.pool.Get().(*[bufferSize]byte)[:] }

func (b *buffers) Put(p []byte) { b.pool.Put((*[bufferSize]byte)(p)) }
