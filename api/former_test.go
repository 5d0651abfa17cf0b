package api

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Each former procedure is that of one method, none is one of this release, and a request for it is one message.
func TestFormerProcedures(t *testing.T) {
	t.Parallel()
	var seen []string
	for _, m := range Methods() {
		if m.Former == "" {
			continue
		}
		if _, ok := Lookup(m.Former); ok || slices.Contains(seen, m.Former) || !strings.HasPrefix(m.Former, "/garboard.v1.") {
			t.Errorf("%s: %s is a method's already, or none", m.Procedure, m.Former)
		}
		if Current(m.Former) != m.Procedure || Current(m.Procedure) != m.Procedure {
			t.Errorf("%s is %s now", m.Former, Current(m.Former))
		}
		seen = append(seen, m.Former)
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(m.Procedure[1:], "/", ".")))
		if err != nil || d.(protoreflect.MethodDescriptor).IsStreamingClient() {
			t.Errorf("%s is asked with a stream, %v", m.Procedure, err)
		}
	}
	for _, path := range []string{"", "/", MetricsPath, "/garboard.v1.NodeService/Version"} {
		if Current(path) != path {
			t.Errorf("%q is %q now", path, Current(path))
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Only the refusal of a gate that doesn't know the procedure leads to another request.
func TestFormerAsksAgainForOneReasonOnly(t *testing.T) {
	t.Parallel()
	var m Method
	for _, renamed := range Methods() {
		if renamed.Former != "" && !renamed.Streaming {
			m = renamed
		}
	}
	refusal := `{"code":"permission_denied","message":"no role may call POST ` + m.Procedure + `"}`
	for _, tt := range []struct {
		what, path, body string
		length           int64 // of the answer
		status           int
		stream, fails    bool // the request is a stream, the answer breaks off
		requests         int
	}{
		{"unknown", m.Procedure, refusal, int64(len(refusal)), 403, false, false, 2},
		{"an answer", m.Procedure, refusal, int64(len(refusal)), 200, false, false, 1},
		{"the role is missing", m.Procedure, "needs the role", 14, 403, false, false, 1},
		{"no length", m.Procedure, refusal, -1, 403, false, false, 1},
		{"long", m.Procedure, refusal + strings.Repeat(" ", maxRefusal), int64(len(refusal) + maxRefusal), 403, false, false, 1},
		{"a stream of requests", m.Procedure, refusal, int64(len(refusal)), 403, true, false, 1},
		{"never renamed", readMetrics, refusal, int64(len(refusal)), 403, false, false, 1},
		{"breaks off", m.Procedure, refusal, int64(len(refusal)), 403, false, true, 1},
	} {
		requests := 0
		transport := Former{roundTripper(func(r *http.Request) (*http.Response, error) {
			requests++
			if sent, err := io.ReadAll(r.Body); string(sent) != "ask" || err != nil {
				t.Errorf("%s: request %d has %q, %v", tt.what, requests, sent, err)
			}
			answer := io.Reader(strings.NewReader(tt.body))
			if tt.fails {
				answer = io.MultiReader(answer, roundTripper(nil))
			}
			return &http.Response{StatusCode: tt.status, ContentLength: tt.length, Body: io.NopCloser(answer)}, nil
		})}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://10.5.0.2:50000"+tt.path, strings.NewReader("ask"))
		if err != nil {
			t.Fatal(err)
		}
		if tt.stream {
			r.ContentLength = -1
		}
		response, err := transport.RoundTrip(r)
		if (err != nil) != tt.fails || requests != tt.requests {
			t.Errorf("%s: %v after %d requests, want %d", tt.what, err, requests, tt.requests)
		}
		if err != nil {
			continue
		}
		if body, err := io.ReadAll(response.Body); string(body) != tt.body || err != nil || r.URL.Path != tt.path {
			t.Errorf("%s: %q, %v; the request is for %s", tt.what, body, err, r.URL.Path)
		}
	}
}

// Read makes it an answer that breaks off.
func (roundTripper) Read([]byte) (int, error) { return 0, errors.New("cut off") }
