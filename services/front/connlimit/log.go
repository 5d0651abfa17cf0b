package connlimit

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// logBurst lines are written at once, and then one per logEvery: clients that
	// aren't authenticated cause them, and PID 1 stores them.
	logBurst = 20
	logEvery = time.Second
)

// limiter is a log handler that drops lines when there are too many, and adds their
// number to the next one.
type limiter struct {
	slog.Handler
	now func() time.Time

	mu      sync.Mutex // guards all following fields
	tokens  int
	last    time.Time // when tokens was counted
	dropped int
}

// Limited is log, with that limit.
func Limited(log *slog.Logger) *slog.Logger {
	return slog.New(&limiter{Handler: log.Handler(), now: time.Now, tokens: logBurst, last: time.Now()})
}

// Handle implements slog.Handler.
func (l *limiter) Handle(ctx context.Context, r slog.Record) error {
	l.mu.Lock()
	now := l.now()
	if more := int(now.Sub(l.last) / logEvery); more > 0 {
		l.tokens = min(l.tokens+more, logBurst)
		l.last = now
	}
	if l.tokens == 0 {
		l.dropped++
		l.mu.Unlock()
		return nil
	}
	l.tokens--
	if l.dropped > 0 {
		r.AddAttrs(slog.Int("dropped", l.dropped))
		l.dropped = 0
	}
	l.mu.Unlock()
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
