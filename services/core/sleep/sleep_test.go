package sleep

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestWhatEndsASleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		wake := make(chan struct{}, 1)
		wake <- struct{}{}
		for _, tt := range []struct {
			name  string
			sleep func() bool
			goOn  bool
			takes time.Duration
		}{
			{"a message", func() bool { return Until(ctx, wake, time.Minute) }, true, 0},
			{"the time", func() bool { return Until(ctx, wake, time.Minute) }, true, time.Minute},
			{"the context", func() bool { return For(ctx, time.Hour) }, false, 59 * time.Minute},
			{"a context that has ended", func() bool { return For(ctx, 0) }, false, 0},
		} {
			began := time.Now()
			if goOn, took := tt.sleep(), time.Since(began); goOn != tt.goOn || took != tt.takes {
				t.Errorf("%s: %v after %s, want %v after %s", tt.name, goOn, took, tt.goOn, tt.takes)
			}
		}
	})
}

func TestRoundsUntilTheContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Second)
		defer cancel()
		count := func(enough int) (rounds int, took time.Duration) {
			began := time.Now()
			for range Every(ctx, time.Minute) {
				if rounds++; rounds == enough {
					break
				}
			}
			return rounds, time.Since(began)
		}
		if rounds, took := count(2); rounds != 2 || took != time.Minute {
			t.Errorf("left in the second round: %d rounds in %s", rounds, took)
		}
		if rounds, took := count(-1); rounds != 2 || took != 90*time.Second {
			t.Errorf("until the context has ended: %d rounds in %s, want 2 in 90 s", rounds, took)
		}
		if rounds, _ := count(-1); rounds != 1 {
			t.Errorf("after the context has ended: %d rounds, want 1", rounds)
		}
	})
}

func TestWhatIsWaitedForWithoutATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		time.AfterFunc(time.Minute, func() { close(done) })
		if began := time.Now(); Await(ctx, done) != nil || time.Since(began) != time.Minute {
			t.Errorf("a channel: %s, want a minute", time.Since(began))
		}
		cancel(nil)
		if err := Await(ctx, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("after the context has ended: %v", err)
		}
		var all sync.WaitGroup
		all.Go(func() { time.Sleep(time.Minute) })
		if Group(&all, time.Second) || !Group(&all, time.Hour) {
			t.Error("a group that takes a minute has ended within a second, or not within an hour")
		}
	})
}
