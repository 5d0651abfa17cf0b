package connlimit

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// Too many lines of a log are counted instead of written.
func TestLimitedLog(t *testing.T) {
	t.Parallel()
	out, now := new(bytes.Buffer), time.Now()
	l := &limiter{Handler: slog.NewTextHandler(out, nil), now: func() time.Time { return now }, tokens: logBurst, last: now}
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
