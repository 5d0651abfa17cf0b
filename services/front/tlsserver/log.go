package tlsserver

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// logBurst lines are written at once, and then one per logEvery: clients that
	// aren't authenticated cause them, and PID 1 stores them.
	logBurst = 20
	logEvery = time.Second
)

// maxWriters bounds how many Lines tells apart; the others share one allowance.
const maxWriters = 256

// Lines bounds how many lines of a log each of its writers causes. The zero value is ready.
type Lines struct {
	mu sync.Mutex // guards by
	by map[string]*allowance
}

// allowance is what a writer has left.
type allowance struct {
	*rate.Limiter
	dropped int
}

// Take reports whether a line may be written, and how many of that writer were dropped
// before it.
func (l *Lines) Take(writer string, now time.Time) (dropped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by[writer] == nil && len(l.by) >= maxWriters {
		maps.DeleteFunc(l.by, func(_ string, a *allowance) bool { return a.TokensAt(now) >= logBurst && a.dropped == 0 })
		if len(l.by) >= maxWriters {
			writer = ""
		}
	}
	a := l.by[writer]
	if a == nil {
		a = &allowance{Limiter: rate.NewLimiter(rate.Every(logEvery), logBurst)}
		if l.by == nil {
			l.by = map[string]*allowance{}
		}
		l.by[writer] = a
	}
	if !a.AllowN(now, 1) {
		a.dropped++
		return 0, false
	}
	dropped, a.dropped = a.dropped, 0
	return dropped, true
}

// limiter is a log handler that drops lines when there are too many, and adds their
// number to the next one.
type limiter struct {
	slog.Handler
	now   func() time.Time
	lines Lines
}

// Limited is log, with that limit.
func Limited(log *slog.Logger) *slog.Logger {
	return slog.New(&limiter{Handler: log.Handler(), now: time.Now})
}

// Handle implements slog.Handler.
func (l *limiter) Handle(ctx context.Context, r slog.Record) error {
	dropped, ok := l.lines.Take("", l.now())
	if !ok {
		return nil
	}
	if dropped > 0 {
		r.AddAttrs(slog.Int("dropped", dropped))
	}
	return l.Handler.Handle(ctx, r)
}

// Writer takes the log lines of net/http, for log.New.
type Writer struct{ Log *slog.Logger }

// own is how net/http logs PID 1's health checks, every few seconds: they check our
// certificate, and close the connection without one of their own.
const own = "TLS handshake error from 127.0.0.1:"

var ownEnds = []string{": tls: client didn't provide a certificate", ": EOF", ": connection reset by peer", ": broken pipe"}

// Write implements io.Writer; it gets a whole line.
func (w Writer) Write(p []byte) (int, error) {
	line := strings.TrimSpace(string(p))
	check := strings.Contains(line, own) && slices.ContainsFunc(ownEnds, func(end string) bool { return strings.HasSuffix(line, end) })
	if !check {
		w.Log.Warn(line)
	}
	return len(p), nil
}
