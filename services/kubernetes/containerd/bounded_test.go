package containerd

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// An answer that stops is an error, and one that is only slow isn't.
func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	const silence = 200 * time.Millisecond
	over := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		flush := w.(http.Flusher).Flush
		switch r.URL.Path {
		case "/silent":
			<-over
		case "/stops":
			io.WriteString(w, "begin")
			flush()
			<-over
		case "/slow":
			tick := time.NewTicker(silence / 4)
			defer tick.Stop()
			for range 8 { // longer than the silence, altogether
				io.WriteString(w, "x")
				flush()
				<-tick.C
			}
		}
	}))
	defer s.Close()
	defer close(over)
	transport := &http.Transport{ResponseHeaderTimeout: silence}
	defer transport.CloseIdleConnections()
	c := &http.Client{Transport: bounded{transport, silence}}
	get := func(path string) (string, error) {
		answer, err := c.Get(s.URL + path)
		if err != nil {
			return "", err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return string(text), err
	}
	if text, err := get("/slow"); err != nil || text != strings.Repeat("x", 8) {
		t.Errorf("slow: %q, %v", text, err)
	}
	if text, err := get("/stops"); err == nil || text != "begin" || !strings.Contains(err.Error(), "has sent nothing for 200ms") || PullReason(err.Error()) != RegistryUnanswered {
		t.Errorf("stops: %q, %v", text, err)
	}
	if _, err := get("/silent"); err == nil || !strings.Contains(err.Error(), "timeout awaiting response headers") {
		t.Errorf("silent: %v", err)
	}
}
