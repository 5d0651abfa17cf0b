package containerd

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// pipes is a network in memory: its time is that of the test.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, open := <-p; open {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error {
	close(p)
	return nil
}

func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	p <- far
	return near, nil
}

// An answer that stops, or that goes on with next to nothing, is an error, and one that is only slow isn't.
func TestAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := strings.Repeat("x", leastBytes/8)
		network := make(pipes)
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			send := func(text string, times int, every time.Duration) {
				for range times {
					io.WriteString(w, text)
					w.(http.Flusher).Flush()
					sleep.For(r.Context(), every)
				}
			}
			switch r.URL.Path {
			case "/silent":
				<-r.Context().Done()
			case "/stops":
				send("begin", 1, time.Hour)
			case "/trickles":
				send("x", 1000, silenceWait*5/6)
			case "/slow":
				send(slow, 100, silenceWait/9) // longer than the silence, altogether
			case "/ends":
				send(slow, 9, silenceWait/9)
				send("x", 2, silenceWait/3) // less than a wait demands, and no more comes
			}
		})}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.Serve(network) //nolint:errcheck // the client sees it
		}()
		transport := &http.Transport{ResponseHeaderTimeout: answerWait, DialContext: network.dial}
		c := &http.Client{Transport: bounded{transport, silenceWait}}
		get := func(path string) (string, error) {
			answer, err := c.Get("http://registry.test" + path)
			if err != nil {
				return "", err
			}
			defer answer.Body.Close()
			text, err := io.ReadAll(answer.Body)
			return string(text), err
		}
		for path, want := range map[string]string{"/slow": strings.Repeat(slow, 100), "/ends": strings.Repeat(slow, 9) + "xx"} {
			if text, err := get(path); err != nil || text != want {
				t.Errorf("%s: %d bytes, %v", path, len(text), err)
			}
		}
		for path, want := range map[string]string{"/stops": "begin", "/trickles": "xx"} {
			begun := time.Now()
			text, err := get(path)
			if err == nil || text != want || !strings.Contains(err.Error(), "registry.test has sent less than 64 KiB within 1m0s") || PullReason(err.Error()) != RegistryUnanswered {
				t.Errorf("%s: %q, %v", path, text, err)
			}
			if took := time.Since(begun); took != silenceWait {
				t.Errorf("%s: given up after %s", path, took)
			}
		}
		if _, err := get("/silent"); err == nil || !strings.Contains(err.Error(), "timeout awaiting response headers") {
			t.Errorf("silent: %v", err)
		}
		transport.CloseIdleConnections()
		s.Close()
		<-ended
	})
}
