package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// nodes answers for the Node n1 with a code; 0: it doesn't answer.
type nodes struct{ code atomic.Int32 }

func (n *nodes) RoundTrip(r *http.Request) (*http.Response, error) {
	code, body := int(n.code.Load()), `{}`
	switch {
	case code == 0:
		return nil, errors.New("connection refused")
	case r.URL.Path == "/api":
		code, body = http.StatusOK, `{"items": [{"metadata": {}, "versions": [{"version": "v1", "resources": [{"resource": "nodes", "scope": "Cluster", "responseKind": {"kind": "Node"}}]}]}]}`
	case r.URL.Path == "/apis":
		code = http.StatusOK
	case code == http.StatusNotFound:
		body = `{"kind": "Status", "reason": "NotFound", "message": "nodes \"n1\" not found"}`
	case code == http.StatusTeapot: // no API server, but somebody
		code, body = http.StatusNotFound, "404 page not found"
	case code == http.StatusForbidden:
		body = `{"kind": "Status", "reason": "Forbidden", "message": "no"}`
	}
	return &http.Response{StatusCode: code, Body: io.NopCloser(bytes.NewBufferString(body)), Request: r}, nil
}

// A kubelet starts anew when its Node was deleted for a minute, as only an API server can say, and later when that happens again.
func TestDeletedNodeIsRegisteredAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server, r := &nodes{}, &registration{}
		client, err := kubeclient.New(kubeclient.Options{Server: "https://k", Transport: server})
		must(t, err)
		var ended chan error
		var stop context.CancelFunc
		start := func() {
			var ctx context.Context
			ctx, stop = context.WithCancel(t.Context())
			ended = make(chan error, 1)
			go func() { ended <- r.watch(ctx, client, "n1") }()
		}
		stays := func(what string, code int, d time.Duration) {
			t.Helper()
			server.code.Store(int32(code))
			time.Sleep(d)
			synctest.Wait()
			if err := r.healthy(); err != nil || len(ended) > 0 {
				t.Errorf("%s: %v, %d ends", what, err, len(ended))
			}
		}
		dies := func(after time.Duration) {
			t.Helper()
			server.code.Store(http.StatusNotFound)
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
		stays("before it is registered", http.StatusNotFound, time.Hour)
		stays("it is there", http.StatusOK, time.Minute)
		stays("no answer", 0, time.Hour)
		stays("forbidden", http.StatusForbidden, time.Hour)
		stays("another server", http.StatusTeapot, time.Hour)
		dies(registerFirst)
		start()
		stays("it is there again", http.StatusOK, time.Minute)
		dies(2 * registerFirst)
		start()
		stays("it is there for long", http.StatusOK, registerMax+2*nodeLook)
		server.code.Store(http.StatusNotFound)
		time.Sleep(2 * nodeLook)
		synctest.Wait()
		if r.healthy() == nil {
			t.Error("a Node that was deleted is nothing")
		}
		stays("somebody has made it again", http.StatusOK, 2*nodeLook)
		dies(2 * registerFirst)
		start()
		stop()
		if err := <-ended; err != nil {
			t.Errorf("it was stopped: %v", err)
		}
	})
}
