package dag

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// S-238: a service that answers is healthy; for one that doesn't, the error has
// the URL and the reason.
func TestS238HTTPCheck(t *testing.T) {
	t.Parallel()
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte("[-]serializable_read failed" + strings.Repeat("x", 10*answerLimit)))
	}))
	defer server.Close()
	check := HTTPCheck(server.URL + "/readyz")
	if err := check(context.Background()); err != nil {
		t.Errorf("200: %v", err)
	}
	status = http.StatusServiceUnavailable
	err := check(context.Background())
	if err == nil || !strings.Contains(err.Error(), "/readyz") || !strings.Contains(err.Error(), "503") || !strings.Contains(err.Error(), "serializable_read") {
		t.Errorf("503: %v", err)
	}
	if err != nil && len(err.Error()) > 2*answerLimit {
		t.Errorf("the whole answer of %d bytes is in the error", len(err.Error()))
	}
	check = HTTPCheck("http://" + freeport.Find(t).String() + "/readyz")
	if err := check(context.Background()); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("closed: %v", err)
	}
}
