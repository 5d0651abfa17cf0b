package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
)

const (
	// manifestLook is how often the files are compared.
	manifestLook = time.Second
	// reachedAfter: once an API server has been ready for so long, the kubelet has heard
	// of it. Its tries back off to 30 s.
	reachedAfter = 40 * time.Second
)

// againForManifests runs the kubelet, and runs it anew when the static pods in dir
// change before it has reached Kubernetes. A kubelet doesn't take away pods until it
// knows from Kubernetes which there should be, and a changed static pod is another
// pod, which waits for the old one to be taken away. If that is the API server,
// nothing would ever end it: an image that isn't there could not be put right.
func againForManifests(ctx context.Context, dir string, ready func() bool, say func(string), run func(context.Context) error) error {
	for {
		began := manifests(dir)
		once, cancel := context.WithCancel(ctx)
		changed := ""
		var wg sync.WaitGroup
		wg.Go(func() {
			if changed = changedBefore(once, dir, began, ready); changed != "" {
				cancel()
			}
		})
		err := run(once)
		cancel()
		wg.Wait()
		if ctx.Err() != nil || changed == "" {
			return err
		}
		say(fmt.Sprintf("starts anew for the changed static pod %s, as it hasn't reached Kubernetes yet", changed))
	}
}

// changedBefore is the file that has changed, or is gone, before the kubelet reached
// Kubernetes, once the files are still again; or "".
func changedBefore(ctx context.Context, dir string, began map[string][]byte, ready func() bool) string {
	look := time.NewTicker(manifestLook)
	defer look.Stop()
	last, reached := began, time.Duration(0)
	for {
		select {
		case <-ctx.Done():
			return ""
		case <-look.C:
		}
		if reached += manifestLook; !ready() {
			reached = 0
		}
		if reached >= reachedAfter {
			return ""
		}
		now := manifests(dir)
		if path := other(last, now); path != "" {
			last = now
			continue // it may be the first of several
		}
		if path := other(began, now); path != "" {
			return path
		}
	}
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

// manifests are the static pods' files. What can't be read isn't there.
func manifests(dir string) map[string][]byte {
	paths, _ := filepath.Glob(filepath.Join(dir, "*.yaml")) // the pattern is right
	found := map[string][]byte{}
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil {
			found[path] = text
		}
	}
	return found
}

// apiServerReady is whether the node knows of an API server that is.
func apiServerReady(r resource.Reader) bool {
	for _, s := range balancer.APIServers.List(r) {
		if s.Spec.Ready {
			return true
		}
	}
	return false
}
