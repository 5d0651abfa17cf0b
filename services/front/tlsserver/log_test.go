package tlsserver

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// Too many lines of a log are counted instead of written.
func TestLimitedLog(t *testing.T) {
	t.Parallel()
	out, now := new(bytes.Buffer), time.Now()
	l := &limiter{Handler: slog.NewTextHandler(out, nil), now: func() time.Time { return now }}
	log := slog.New(l)
	for range logBurst + 7 {
		log.Info("x")
	}
	if n := strings.Count(out.String(), "\n"); n != logBurst {
		t.Errorf("%d lines", n)
	}
	now = now.Add(logEvery)
	log.Info("y")
	if !strings.HasSuffix(out.String(), "msg=y dropped=7\n") {
		t.Error(out.String())
	}
	if err := l.Handle(context.Background(), slog.NewRecord(now, slog.LevelInfo, "z", 0)); err != nil {
		t.Error(err)
	}
}

// Who writes too much loses lines, and nobody else does. A crowd of writers is bounded, too.
func TestLinesOfEachWriter(t *testing.T) {
	t.Parallel()
	var l Lines
	now := time.Now()
	for i := range 3 * logBurst {
		if _, ok := l.Take("mallory", now); ok != (i < logBurst) {
			t.Errorf("line %d of a flood: %v", i, ok)
		}
	}
	if _, ok := l.Take("alice", now); !ok {
		t.Error("another writer lost a line")
	}
	if dropped, ok := l.Take("mallory", now.Add(logEvery)); !ok || dropped != 2*logBurst {
		t.Errorf("a second later: %d were dropped, %v", dropped, ok)
	}
	for i := range 10 * maxWriters {
		l.Take(fmt.Sprint(i), now.Add(logEvery))
	}
	if n := len(l.by); n > maxWriters+1 {
		t.Errorf("%d writers are remembered", n)
	}
	if _, ok := l.Take("late", now.Add(logEvery)); ok {
		t.Error("a crowd has more lines than all writers that are told apart")
	}
	if _, ok := l.Take("late", now.Add(time.Hour)); !ok || len(l.by) > 2 {
		t.Errorf("after the crowd: %v, %d writers are remembered", ok, len(l.by))
	}
}
