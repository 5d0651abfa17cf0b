package clock

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/garboard-os/garboard/services/core/resource"
)

// S-275, S-276: the controller is known by its name, and logs each change once.
func TestS275TimeStatusController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, store := &syncBuffer{}, resource.NewStore()
		rt, err := resource.NewRuntime(store, slog.New(slog.NewTextHandler(log, nil)), StatusController())
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- rt.Run(ctx) }()
		synctest.Wait()
		for _, s := range []Status{
			{Message: "no answer"}, {Message: "no answer", Poll: 1}, {Synced: true, Source: SourceNTP, Server: "192.0.2.1"},
			{Synced: true, Source: SourceNTP, Server: "192.0.2.1", Offset: 1}, {Message: "no answer"}, {Synced: true, Source: SourceHost},
		} {
			if err := Statuses.Put(store.As("test"), StatusID, s); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for text, want := range map[string]int{
			"v1alpha1.TimeStatusController: controller starting":                     1,
			"v1alpha1.TimeStatusController: the time isn't synchronised: no answer":  2,
			"v1alpha1.TimeStatusController: the time is synchronised with 192.0.2.1": 1,
			"v1alpha1.TimeStatusController: the time is the host's":                  1,
		} {
			if got := strings.Count(log.String(), text); got != want {
				t.Errorf("%d times %q in %s", got, text, log)
			}
		}
	})
}
