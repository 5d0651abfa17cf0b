package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A static pod that changes before Kubernetes is reached takes a new kubelet; one that
// is added doesn't, nor one that changes afterwards.
func TestStartedAnewForManifests(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "garboard-kube-apiserver.yaml")
	write := func(path, text string) {
		t.Helper()
		must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	write(file, "image: wrong")
	synctest.Test(t, func(t *testing.T) {
		var ready atomic.Bool
		var runs atomic.Int32
		var event atomic.Value
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- restartForStaticPods(ctx, dir, ready.Load, func(text string) { event.Store(text) }, func(ctx context.Context) error {
				runs.Add(1)
				<-ctx.Done()
				return errors.New("told to end")
			})
		}()
		synctest.Wait() // it has looked once
		after := func(d time.Duration, want int32) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if got := runs.Load(); got != want {
				t.Errorf("%d runs, want %d", got, want)
			}
		}
		write(filepath.Join(dir, "garboard-kube-scheduler.yaml"), "added")
		after(time.Minute, 1)
		write(file, "image: right")
		after(3*staticPodPoll, 2)
		if text, _ := event.Load().(string); !strings.Contains(text, file) {
			t.Errorf("it says %q", text)
		}
		must(t, os.Remove(file))
		after(3*staticPodPoll, 3)
		// An API server that is up for a moment only counts for nothing.
		write(file, "image: wrong")
		ready.Store(true)
		after(reachedAfter/2, 3)
		ready.Store(false)
		after(2*staticPodPoll, 3)
		write(filepath.Join(dir, "garboard-kube-scheduler.yaml"), "changed")
		after(3*staticPodPoll, 4)
		ready.Store(true)
		after(2*reachedAfter, 4)
		write(file, "image: another")
		after(time.Minute, 4)
		cancel()
		if err := <-ended; err == nil || err.Error() != "told to end" {
			t.Errorf("it ends with %v", err)
		}
	})
}

// A node that was never self-hosted starts nothing that a pod has put among the checkpoints.
func TestCheckpointsCountWhileSelfHosted(t *testing.T) {
	t.Parallel()
	from, to, mark := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "self-hosted")
	must(t, os.MkdirAll(filepath.Join(from, "manifests"), 0o700))
	must(t, os.WriteFile(filepath.Join(from, "manifests", "evil.json"), []byte("{}"), 0o600))
	// the last: while it is converted
	for i, step := range []struct{ selfHosted, restored bool }{{false, false}, {true, true}, {false, true}} {
		must(t, os.RemoveAll(to))
		must(t, os.Mkdir(to, 0o700))
		must(t, checkpoints(step.selfHosted, mark, from, to))
		found, err := os.ReadDir(to)
		must(t, err)
		if restored := len(found) > 0; restored != step.restored {
			t.Errorf("%d: restored %v, want %v", i, restored, step.restored)
		}
	}
}

// What was active before a reboot is restored, and nothing else.
func TestCheckpointsAreRestored(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), t.TempDir()
	must(t, restoreCheckpoints(from, to)) // a node that has never had any
	must(t, os.MkdirAll(filepath.Join(from, "manifests"), 0o700))
	must(t, os.WriteFile(filepath.Join(from, "manifests", "kube-system-a.json"), []byte("{}"), 0o600))
	must(t, os.WriteFile(filepath.Join(from, "manifests", "kube-system-b.json.tmp"), []byte("{"), 0o600))
	must(t, restoreCheckpoints(from, to))
	found, err := os.ReadDir(to)
	must(t, err)
	if len(found) != 1 || found[0].Name() != "kube-system-a.json" {
		t.Errorf("restored: %v", found)
	}
}
