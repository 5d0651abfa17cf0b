//go:build e2e

package clientgo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	clientexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// stream is the URL of a pod's subresource that is a stream.
func (c *cluster) stream(pod, what string, options *corev1.PodExecOptions) *url.URL {
	r := c.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(c.space).Name(pod).SubResource(what)
	if options != nil {
		r = r.VersionedParams(options, scheme.ParameterCodec)
	}
	return r.URL()
}

// exec runs a program in a pod over a websocket, like the current kubectl.
func (c *cluster) exec(ctx context.Context, pod string, command ...string) (string, error) {
	u := c.stream(pod, "exec", &corev1.PodExecOptions{Command: command, Stdout: true, Stderr: true})
	e, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, u.String())
	if err != nil {
		return "", err
	}
	return run(ctx, e, nil)
}

func run(ctx context.Context, e remotecommand.Executor, stdin io.Reader) (string, error) {
	var out, complaints bytes.Buffer
	err := e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: &out, Stderr: &complaints})
	if err != nil {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(complaints.String()))
	}
	return out.String(), err
}

// Logs and streams go through the API server to the kubelet, whose certificate
// the API server verifies. No verification is disabled.
func TestStreams(t *testing.T) {
	c := connect(t, "streams")
	pods := c.deploy(2) // one on each worker
	for _, p := range pods {
		t.Run("on "+p.Spec.NodeName, func(t *testing.T) {
			c := c.in(t)
			t.Run("logs", func(t *testing.T) { c.in(t).logs(p.Name) })
			t.Run("exec over websocket", func(t *testing.T) {
				c.in(t).execs(p.Name, func(u *url.URL) (remotecommand.Executor, error) {
					return remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, u.String())
				})
			})
			t.Run("exec over SPDY", func(t *testing.T) {
				c.in(t).execs(p.Name, func(u *url.URL) (remotecommand.Executor, error) {
					return remotecommand.NewSPDYExecutor(c.config, http.MethodPost, u)
				})
			})
			t.Run("port-forward over websocket", func(t *testing.T) {
				d, err := portforward.NewSPDYOverWebsocketDialerForStreaming(c.stream(p.Name, "portforward", nil), c.config)
				if err != nil {
					t.Fatal(err)
				}
				c.in(t).forwards(p.Name, d)
			})
			t.Run("port-forward over SPDY", func(t *testing.T) {
				transport, upgrader, err := spdy.RoundTripperFor(c.config)
				if err != nil {
					t.Fatal(err)
				}
				u := c.stream(p.Name, "portforward", nil)
				c.in(t).forwards(p.Name, spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u))
			})
		})
	}
}

func (c *cluster) logs(pod string) {
	text, err := c.client.CoreV1().Pods(c.space).GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(c.t.Context())
	if err != nil || !strings.Contains(string(text), "Starting to serve") {
		c.t.Errorf("log of %s: %q, %v", pod, text, err)
	}
	_, err = c.client.CoreV1().Pods(c.space).GetLogs(pod, &corev1.PodLogOptions{Container: "other"}).DoRaw(c.t.Context())
	if !apierrors.IsBadRequest(err) {
		c.t.Errorf("log of a container that isn't there: %v", err)
	}
}

// execs: a program reads and writes, and its exit code is returned.
func (c *cluster) execs(pod string, dial func(*url.URL) (remotecommand.Executor, error)) {
	kubectl := func(stdin string, arguments ...string) (string, error) {
		e, err := dial(c.stream(pod, "exec", &corev1.PodExecOptions{
			Command: append([]string{"/usr/local/bin/kubectl"}, arguments...), Stdin: true, Stdout: true, Stderr: true,
		}))
		if err != nil {
			return "", err
		}
		return run(c.t.Context(), e, strings.NewReader(stdin))
	}
	out, err := kubectl("current-context: read\n", "config", "current-context", "--kubeconfig=/dev/stdin")
	if err != nil || out != "read\n" {
		c.t.Errorf("kubectl config current-context: %q, %v", out, err)
	}
	var exit clientexec.CodeExitError
	if out, err = kubectl("", "no-such-command"); !errors.As(err, &exit) || exit.Code != 1 {
		c.t.Errorf("a program that fails: %q, %v", out, err)
	}
}

// forwards: the pod's server answers through a port of this machine, and a
// forward to a port without a listener returns the reason.
func (c *cluster) forwards(pod string, d httpstream.Dialer) {
	stop, open := make(chan struct{}), make(chan struct{})
	const closed = 1
	f, err := portforward.NewOnAddressesForStreaming(d, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", webPort), fmt.Sprintf("0:%d", closed)}, stop, open, io.Discard, io.Discard)
	if err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.ForwardPorts() }()
	defer func() {
		close(stop)
		if err := <-ended; err != nil && !errors.Is(err, portforward.ErrLostConnectionToPod) {
			c.t.Errorf("port-forward ended with %v", err)
		}
	}()
	select {
	case <-open:
	case err := <-ended:
		ended <- nil
		c.t.Fatalf("port-forward: %v", err)
	}
	ports, err := f.GetPorts()
	if err != nil {
		c.t.Fatal(err)
	}
	local := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d/pod/name", ports[i].Local) }
	for range 2 { // a second connection, too
		if name, err := get(c.t.Context(), local(0)); err != nil || name != pod {
			c.t.Fatalf("port %d: %q, %v", webPort, name, err)
		}
	}
	if name, err := get(c.t.Context(), local(1)); err == nil {
		c.t.Errorf("port %d: %q answers", closed, name)
	}
	want := fmt.Sprintf("forwarding %d -> %d", ports[1].Local, closed)
	c.eventually(knownBudget, "it says why", func(context.Context) error {
		if said := complaints.String(); !strings.Contains(said, want) || !strings.Contains(said, "connection refused") {
			return fmt.Errorf("it says %q", said)
		}
		return nil
	})
}

// complaints are errors that client-go logs because it can't return them, for
// example of a forwarded connection.
var complaints locked

func TestMain(m *testing.M) {
	runtime.ErrorHandlers = append(runtime.ErrorHandlers, func(_ context.Context, err error, _ string, _ ...any) {
		fmt.Fprintln(&complaints, err)
	})
	os.Exit(m.Run())
}

// locked is a buffer for concurrent writes and reads.
type locked struct {
	mu     sync.Mutex // guards the buffer
	buffer bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.String()
}
