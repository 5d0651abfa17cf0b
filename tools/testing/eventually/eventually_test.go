package eventually

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestThatWaitsForTheCondition(t *testing.T) {
	t.Parallel()
	tries := 0
	That(t, time.Minute, "third try", func() error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if tries != 3 {
		t.Fatalf("%d tries, want 3", tries)
	}
}

func TestSlowdownIsBounded(t *testing.T) {
	t.Parallel()
	if f := Slowdown(); f < 1 || f > slowest {
		t.Fatalf("slowdown %v is outside 1 to %d", f, slowest)
	}
	if Scale(time.Second) < time.Second {
		t.Fatal("a deadline was made shorter")
	}
}

func TestContextEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := Context(t.Context(), time.Millisecond)
	defer cancel()
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, context.DeadlineExceeded) {
		t.Errorf("it ended by %v", cause)
	}
	// The twin: somebody else ends it.
	ctx, cancel = Context(t.Context(), time.Hour)
	cancel()
	<-ctx.Done()
	if cause := context.Cause(ctx); errors.Is(cause, context.DeadlineExceeded) {
		t.Errorf("it ended by %v", cause)
	}
}
