//go:build e2e && long

package full

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	fillerImage = "registry.example/garboard/filler:1" // RFC 2606
	// fillBudget is for the filler to use all space.
	fillBudget = 20 * time.Second
	// fillerBudget is for its image to be pulled, and for the pod to start.
	fillerBudget = 30 * time.Second
)

// fillerPod fills EPHEMERAL. It is critical, because the kubelet evicts other
// pods when there is no space left.
const fillerPod = `
apiVersion: v1
kind: Pod
metadata: {name: filler, namespace: kube-system}
spec:
  hostNetwork: true
  restartPolicy: Never
  priorityClassName: system-node-critical
  containers:
  - name: filler
    image: ` + fillerImage + `
    command: [/filler, /room, "http://ADDRESS/"]
    volumeMounts: [{name: room, mountPath: /room}]
  volumes: [{name: room, emptyDir: {}}]
`

// A filler controls the pod: it sends when to fill the disk, and when to end.
// The kubelet and the API server can't do that, because they need space, too.
type filler struct {
	c     *e2etest.Cluster
	asks  chan struct{} // it waits for work
	fills chan struct{} // it has to fill the disk
	end   chan struct{}
	once  sync.Once
}

func newFiller(t *testing.T, c *e2etest.Cluster) *filler {
	t.Helper()
	f := &filler{c: c, asks: make(chan struct{}), fills: make(chan struct{}), end: make(chan struct{})}
	here := c.Plan.Network.Masked().Addr().Next() // as nodes see this machine
	listener, err := c.Network().Listen(netip.AddrPortFrom(here, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // until it is closed
	t.Cleanup(func() {
		f.release()
		_ = server.Close()
		serving.Wait()
	})
	c.Apply(strings.ReplaceAll(fillerPod, "ADDRESS", listener.Addr().(*net.TCPAddr).String()))
	if !f.asked(fillerBudget) {
		t.Fatalf("the filler hasn't asked for anything: %s", c.Kubectl("describe", "pod", "-n", "kube-system", "filler"))
	}
	return f
}

// ServeHTTP answers as soon as there is something to do.
func (f *filler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case f.asks <- struct{}{}:
	case <-r.Context().Done():
		return
	case <-f.end:
	}
	select {
	case <-f.fills:
	case <-r.Context().Done():
	case <-f.end:
		w.WriteHeader(http.StatusGone)
	}
}

// asked waits until the filler waits for work.
func (f *filler) asked(budget time.Duration) bool {
	select {
	case <-f.asks:
		return true
	case <-time.After(eventually.Scale(f.c.Scale(budget))):
		return false
	}
}

// fill uses all free space; a repeated call uses what has become free.
func (f *filler) fill() error {
	select {
	case f.fills <- struct{}{}:
	case <-time.After(eventually.Scale(f.c.Scale(fillBudget))):
		return errors.New("the filler doesn't listen")
	}
	if !f.asked(fillBudget) {
		return errors.New("the filler isn't done")
	}
	return nil
}

// release ends it, and its space is free.
func (f *filler) release() { f.once.Do(func() { close(f.end) }) }
