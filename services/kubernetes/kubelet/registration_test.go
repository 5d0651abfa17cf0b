package kubelet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// A kubelet starts anew when its Node was deleted for a minute, as only an API server can say, and later when that
// happens again.
func TestDeletedNodeIsRegisteredAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, r := resource.NewStore(), &registration{}
		must(t, configuration.Configs.Put(store.As("test"), configuration.ConfigID, &config.Config{}))
		kubernetes := func(h NodeHealth) {
			t.Helper()
			must(t, NodeHealths.Put(store.As("test"), HealthID, h))
		}
		deleted, there := NodeHealth{Unregistered: true, Faults: []Fault{{Object: NodeObject}}}, NodeHealth{}
		var ended chan error
		var stop context.CancelFunc
		start := func() {
			var ctx context.Context
			ctx, stop = context.WithCancel(t.Context())
			ended = make(chan error, 1)
			go func() { ended <- r.watch(ctx, store) }()
		}
		stays := func(what string, h NodeHealth, d time.Duration) {
			t.Helper()
			kubernetes(h)
			time.Sleep(d)
			synctest.Wait()
			if err := r.healthy(); err != nil || len(ended) > 0 {
				t.Errorf("%s: %v, %d ends", what, err, len(ended))
			}
		}
		dies := func(after time.Duration) {
			t.Helper()
			kubernetes(deleted)
			time.Sleep(nodeLook + time.Second)
			synctest.Wait()
			if err := r.healthy(); reason.Of(err) != NodeDeleted || !strings.Contains(fmt.Sprint(err), "was deleted") {
				t.Errorf("it says %v", err)
			}
			begin := time.Now()
			if err := <-ended; reason.Of(err) != NodeDeleted {
				t.Error(err)
			}
			if took := time.Since(begin); took < after-nodeLook || took > after+nodeLook {
				t.Errorf("it ends after %s, not %s", took, after)
			}
			if err := r.healthy(); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		}
		start()
		stays("before it is registered", deleted, time.Hour)
		stays("it is there", there, time.Minute)
		stays("no answer", unanswered(time.Time{}, errors.New("connection refused")), time.Hour)
		stays("words of somebody else", NodeHealth{Faults: []Fault{{NodeObject, NoNode, "Kubernetes has no Node n1", time.Time{}}}}, time.Hour)
		for i := range 5 { // a person deletes it now and then
			dies(registerFirst)
			start()
			stays("it is there again", there, registerSteady+time.Duration(i+2)*nodeLook)
		}
		for _, pause := range []time.Duration{1, 1, 1, 2, 4, 8, 16, 16} { // a program does at once
			dies(pause * registerFirst)
			start()
			stays("it is there again", there, time.Minute)
		}
		stays("it is there for long", there, registerSteady)
		kubernetes(deleted)
		time.Sleep(2 * nodeLook)
		synctest.Wait()
		if r.healthy() == nil {
			t.Error("a Node that was deleted is nothing")
		}
		stays("somebody has made it again", there, 2*nodeLook)
		dies(registerFirst)
		start()
		stop()
		if err := <-ended; err != nil {
			t.Errorf("it was stopped: %v", err)
		}
	})
}
