package dag

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/services/core/reason"
)

// sick is a daemon whose check fails between two times.
func sick(from, to time.Duration) Service {
	begin := time.Now()
	svc := daemon("svc")
	svc.Health = &Health{Period: time.Second, Check: func(context.Context) error {
		if at := time.Since(begin); at >= from && at < to {
			return errors.New("503")
		}
		return nil
	}}
	return svc
}

func TestS240UnhealthyIsNotUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, sick(9500*time.Millisecond, 20*time.Second))
		var seen []string
		for range 25 {
			s, _ := r.Status("svc")
			seen = append(seen, string(s.Health))
			if s.Up != (s.Health == HealthOK) {
				t.Errorf("status %+v", s)
			}
			pass(time.Second)
		}
		// It fails from the check at 10 s on; it is unhealthy after the third.
		want := slices.Concat(slices.Repeat([]string{"OK"}, 12), slices.Repeat([]string{"Fail"}, 8), slices.Repeat([]string{"OK"}, 5))
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Error(diff)
		}
		r.want("svc",
			"[Preparing]: Running pre state", "[Starting]: Creating service runner", "[Running]: Started svc",
			"[Running]: Health check successful", "[Running]: Health check failed: 503", "[Running]: Health check failed: 503",
			"[Running]: Health check successful")
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestOneFailureIsNotEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, sick(9500*time.Millisecond, 11500*time.Millisecond))
		for range 20 {
			if s, _ := r.Status("svc"); !s.Up {
				t.Errorf("status %+v", s)
			}
			pass(time.Second)
		}
		if messages := r.messages("svc"); !slices.Equal(messages[4:], []string{"[Running]: Health check failed: 503", "[Running]: Health check successful"}) {
			t.Errorf("%q", messages)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

// The status has the last error, also one that isn't an event.
func TestStatusHasTheLastError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks atomic.Int64
		svc := daemon("svc")
		svc.Health = &Health{Period: time.Second, Check: func(context.Context) error {
			n := checks.Add(1)
			return reason.With(reason.Code(fmt.Sprintf("Check%d", n)), fmt.Errorf("check %d", n))
		}}
		r := start(t, svc)
		for range 20 {
			pass(time.Second)
			n := fmt.Sprint(checks.Load())
			if s, _ := r.Status("svc"); s.Message != "Health check failed: check "+n || s.Reason != reason.Code("Check"+n) {
				t.Errorf("after check %s: %+v", n, s)
			}
		}
		if failed := len(r.messages("svc")) - 3; failed != 2 {
			t.Errorf("%d events of failed checks, want the first one and that at which the service became unhealthy", failed)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestHealthIsUnknownUntilTheFirstResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, sick(0, 1500*time.Millisecond))
		pass(time.Second)
		if s, _ := r.Status("svc"); s.Health != HealthUnknown || s.Up || s.State != Running {
			t.Errorf("status %+v", s)
		}
		// Failures at the short intervals of the start don't count as three over two periods.
		pass(time.Second)
		if s, _ := r.Status("svc"); s.Health != HealthOK {
			t.Errorf("status %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestChecksTimeOutAndDoNotOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks, open, overlap := 0, 0, false
		release := make(chan struct{})
		svc := daemon("svc")
		svc.StopBudget = time.Second
		svc.Health = &Health{Period: time.Second, Timeout: 2 * time.Second, Check: func(context.Context) error {
			checks++
			open++
			overlap = overlap || open > 1
			<-release // ignores its context
			open--
			return nil
		}}
		r := start(t, svc)
		pass(time.Minute)
		if s, _ := r.Status("svc"); s.Health != HealthFail || !strings.HasSuffix(s.Message, "no answer within 2s") || checks != 1 {
			t.Errorf("%d checks, status %+v", checks, s)
		}
		if err := r.end(); err == nil || !strings.HasSuffix(err.Error(), ": svc") {
			t.Error(err)
		}
		if !slices.Contains(r.messages("svc"), "[Stopping]: Given up: a health check did not return within 1s") {
			t.Errorf("%q", r.messages("svc"))
		}
		close(release)
		synctest.Wait()
		if overlap {
			t.Error("checks overlapped")
		}
	})
}
