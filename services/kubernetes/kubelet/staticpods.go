package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// staticPodPoll is how often the files are compared.
	staticPodPoll = time.Second
	// reachedAfter: once an API server has been ready for so long, the kubelet has reached
	// it. Its tries back off to 30 s.
	reachedAfter = 40 * time.Second
)

// restartForStaticPods runs the kubelet, and restarts it when the static pods in dir
// change before it has reached Kubernetes. A kubelet doesn't remove pods before it has
// the list of pods from Kubernetes, and a changed static pod is another pod, which waits
// until the old one is removed. If that is the API server, the wait would never end: an
// image that isn't there could not be corrected.
func restartForStaticPods(ctx context.Context, dir string, ready func() bool, event func(string), run func(context.Context) error) error {
	for {
		began, changed := staticPodFiles(dir), ""
		err := dag.While(ctx, run, func(ctx context.Context) error {
			if changed = changedBefore(ctx, dir, began, ready); changed != "" {
				return context.Canceled
			}
			return nil
		})
		if ctx.Err() != nil || changed == "" {
			return err
		}
		event(fmt.Sprintf("starts anew for the changed static pod %s, as it hasn't reached Kubernetes yet", changed))
	}
}

// changedBefore is the file that has changed, or is gone, before the kubelet reached
// Kubernetes, once the files are still again; or "".
func changedBefore(ctx context.Context, dir string, began map[string][]byte, ready func() bool) string {
	last, reached := began, time.Duration(0)
	for sleep.For(ctx, staticPodPoll) {
		if reached += staticPodPoll; !ready() {
			reached = 0
		}
		if reached >= reachedAfter {
			return ""
		}
		now := staticPodFiles(dir)
		if path := other(last, now); path != "" {
			last = now
			continue // it may be the first of several
		}
		if path := other(began, now); path != "" {
			return path
		}
	}
	return ""
}

// other is a file of the first that is another, or gone, in the second.
func other(a, b map[string][]byte) string {
	for path, text := range a {
		if !bytes.Equal(text, b[path]) {
			return path
		}
	}
	return ""
}

// staticPodFiles are the static pods' files. A file that can't be read is left out.
func staticPodFiles(dir string) map[string][]byte {
	paths, _ := untrusted.Glob(dir, "*.yaml") // those that can't be read are left out
	found := map[string][]byte{}
	for _, path := range paths {
		if text, err := untrusted.ReadFile(path, maxFile); err == nil {
			found[path] = text
		}
	}
	return found
}

// checkpoints restores those of a control plane that is self-hosted: by its configuration, or
// by the mark from an earlier boot, because a conversion changes the configuration first. On all
// other nodes, what is in their place isn't of pod-checkpointer.
func checkpoints(selfHosted bool, mark, from, to string) error {
	if selfHosted {
		if err := boot.WriteFile(mark, nil, 0o600); err != nil {
			return err
		}
	} else if _, err := os.Stat(mark); err != nil {
		return boot.IgnoreMissing(err)
	}
	return restoreCheckpoints(from, to)
}

// restoreCheckpoints writes the checkpoints that were active in the last boot to the static
// pods: they start a self-hosted control plane, and /etc is new after each boot.
func restoreCheckpoints(from, to string) error {
	paths, err := untrusted.Glob(filepath.Join(from, "manifests"), "*.json")
	if err != nil {
		return fmt.Errorf("restore the checkpoints of pods: %w", err)
	}
	for _, path := range paths {
		text, err := untrusted.ReadFile(path, maxFile)
		if err == nil {
			err = untrusted.WriteFile(filepath.Join(to, filepath.Base(path)), text, 0o600)
		}
		if err != nil {
			return fmt.Errorf("restore the checkpoint of a pod: %w", err)
		}
	}
	return nil
}
