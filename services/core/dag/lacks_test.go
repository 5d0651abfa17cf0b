package dag

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// A service whose next run would lack something isn't stopped for it, and says so. It starts nevertheless where it
// doesn't run.
func TestRestartWaitsForWhatIsLacking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lacking atomic.Pointer[error]
		var begins times
		svc := daemon("kubelet")
		run := svc.Run
		svc.Lacks = func(context.Context) error { return *lacking.Load() }
		svc.Run = func(ctx context.Context, h *Handle) error {
			begins.add(0)
			return run(ctx, h)
		}
		lacking.Store(new(error))
		r := start(t, svc)
		pass(time.Second)
		why := reason.With("ImageNotFound", errors.New("image x: not found"))
		lacking.Store(&why)
		for range 2 {
			if err := r.Restart(t.Context(), "kubelet"); !errors.Is(err, why) {
				t.Errorf("a restart returned %v", err)
			}
		}
		pass(time.Second)
		if s, _ := r.Status("kubelet"); !s.Up || s.Waiting != "image x: not found" || s.Lacks != "ImageNotFound" || len(begins.all()) != 1 {
			t.Errorf("it is %+v, after %d runs", s, len(begins.all()))
		}
		r.want("kubelet", "[Preparing]: Running pre state", "[Starting]: Creating service runner", "[Running]: Started kubelet", "[Running]: image x: not found")
		if err := r.Stop(t.Context(), "kubelet"); err != nil {
			t.Fatal(err)
		}
		if err := r.Start(t.Context(), "kubelet"); err != nil {
			t.Fatal(err)
		}
		pass(2 * RestartFirst)
		if s, _ := r.Status("kubelet"); !s.Up || s.Lacks == "" {
			t.Errorf("after it was started again, it is %+v", s)
		}
		lacking.Store(new(error))
		if err := r.Restart(t.Context(), "kubelet"); err != nil {
			t.Error(err)
		}
		pass(time.Second)
		if s, _ := r.Status("kubelet"); !s.Up || s.Waiting != "" || s.Lacks != "" {
			t.Errorf("with all that it needs, it is %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

// A service that ends by itself says what its next run goes without.
func TestARunSaysWhatItGoesWithout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		svc := crashing("kubelet", 1, time.Second, &begins)
		svc.Lacks = func(context.Context) error {
			if len(begins.all()) == 0 {
				return nil
			}
			return reason.With("ImageSick", errors.New("goes on with kubelet:1"))
		}
		r := start(t, svc)
		pass(2 * time.Second)
		if s, _ := r.Status("kubelet"); !s.Up || s.Waiting != "goes on with kubelet:1" || s.Lacks != "ImageSick" {
			t.Errorf("it is %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}
