package background

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestStopEndsAndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := false
		stop := Start(t.Context(), func(ctx context.Context) {
			<-ctx.Done()
			time.Sleep(time.Minute)
			ended = true
		})
		synctest.Wait()
		if ended {
			t.Error("it ended by itself")
		}
		stop()
		if !ended {
			t.Error("stop didn't wait")
		}
		stop() // again
	})
}

func TestItsContextEndsWithThatOfTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := false
		defer Start(ctx, func(ctx context.Context) {
			<-ctx.Done()
			ended = true
		})()
		cancel()
		synctest.Wait()
		if !ended {
			t.Error("it goes on")
		}
	})
}
