package containerd

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// trialRig is a kubelet with a configuration, and without a containerd.
type trialRig struct {
	*Runner
	t      *testing.T
	config config.Config
	sick   error // what the program's health check says
	proves func(context.Context) error
}

func newTrial(t *testing.T) *trialRig {
	r := &trialRig{t: t, sick: errors.New("connection refused")}
	store := resource.NewStore()
	r.Runner = &Runner{
		Containerd: New(Options{Store: store, Logs: logs.New(t.Output())}), ID: "kubelet", Field: "machine.kubelet.image",
		Image: func(c *config.Config) string { return c.Machine.Kubelet.Image },
	}
	r.proves = r.Proves(func(context.Context) error { return r.sick })
	return r
}

func (r *trialRig) configure(change func(*config.Kubelet)) {
	change(&r.config.Machine.Kubelet)
	c := r.config
	if err := configuration.Configs.Put(r.Containerd.Store.As("test"), configuration.ConfigID, &c); err != nil {
		r.t.Fatal(err)
	}
}

// starts is a run of an image of the configuration, as Prepare begins it.
func (r *trialRig) starts(image string) {
	r.configure(func(k *config.Kubelet) { k.Image = image })
	r.take(image)
}

func (r *trialRig) check() {
	ctx, cancel := context.WithCancel(r.t.Context())
	defer cancel()
	if r.sick == context.Canceled {
		cancel()
	}
	if err := r.proves(ctx); err != r.sick {
		r.t.Errorf("the check says %v, want %v", err, r.sick)
	}
}

func (r *trialRig) ends(times int) {
	for range times {
		r.over(&ExitError{"kubelet", 1}, "usage\nunknown flag: --x")
	}
}

// runs checks what the next run has, and why that isn't what is configured.
func (r *trialRig) runs(image string, words ...string) {
	r.t.Helper()
	err := r.Lacks(r.t.Context())
	if got := *r.ran.Load(); got != image || (reason.Of(err) == ImageSick) != (len(words) > 0) {
		r.t.Errorf("it runs %s, and lacks: %v", got, err)
	}
	for _, w := range words {
		if err != nil && !strings.Contains(err.Error(), w) {
			r.t.Errorf("no %q in %v", w, err)
		}
	}
}

func TestAnImageThatEndsGoes(t *testing.T) {
	t.Parallel()
	r := newTrial(t)
	r.starts("kubelet:1")
	r.sick = nil
	r.check()
	r.sick = context.Canceled // it is stopped for the new one
	r.check()
	r.starts("pause:2")
	r.ends(TrialEnds - 1)
	r.runs("pause:2")
	r.ends(1)
	r.runs("kubelet:1", "goes on with kubelet:1, and not with what machine.kubelet.image names: image pause:2 doesn't work", "status 1; it said last: unknown flag: --x")
	r.config.Machine.Sysctls = map[string]string{"a": "b"}
	r.configure(func(*config.Kubelet) {})
	r.runs("kubelet:1", "pause:2 doesn't work")
	r.configure(func(k *config.Kubelet) { k.ExtraArgs = config.Args{"v": {"2"}} })
	r.runs("kubelet:1") // it will try
	r.configure(func(k *config.Kubelet) { k.Image, k.ExtraArgs = "kubelet:1", nil })
	if err := r.Lacks(t.Context()); err != nil {
		t.Errorf("with the former image: %v", err)
	}
	r.configure(func(k *config.Kubelet) { k.Image = "pause:2" })
	r.runs("kubelet:1") // it will try again
}

func TestWhatWasHealthyOnceStays(t *testing.T) {
	t.Parallel()
	r := newTrial(t)
	r.starts("etcd:1")
	r.sick = nil
	r.check()
	r.starts("etcd:2")
	r.check()
	r.sick = errors.New("no leader")
	r.check()
	r.ends(2 * TrialEnds)
	r.runs("etcd:2")
}

func TestNothingBetterToGoBackTo(t *testing.T) {
	t.Parallel()
	// The other one starts anew just then.
	for down, want := range map[time.Duration]string{startTime + 1: "kubelet:2", time.Second: "kubelet:1"} {
		synctest.Test(t, func(t *testing.T) {
			r := newTrial(t)
			r.starts("kubelet:1")
			r.ends(2 * TrialEnds)
			r.runs("kubelet:1")
			r.sick = nil
			r.check()
			r.sick = errors.New("no leader")
			time.Sleep(down)
			r.check()
			r.starts("kubelet:2")
			r.ends(2 * TrialEnds)
			r.runs(want, map[bool][]string{true: {"kubelet:2 doesn't work"}}[want == "kubelet:1"]...)
		})
	}
}

func TestAnImageThatIsNeverHealthyGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newTrial(t)
		r.starts("etcd:1")
		r.sick = nil
		r.check()
		r.starts("etcd:2")
		began, why := time.Now(), r.late(t.Context())
		if why == nil || time.Since(began) != TrialTime {
			t.Fatalf("it ended after %s: %v", time.Since(began), why)
		}
		r.over(why, "")
		r.runs("etcd:1", "etcd:2 doesn't work: it wasn't healthy within 5m0s")
		if why := r.late(t.Context()); why != nil {
			t.Errorf("the former one ends, too: %v", why)
		}
	})
}
