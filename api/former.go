package api

import (
	"bytes"
	"io"
	"net/http"
)

// A method whose procedure was another one in the former release has the option former. For one release, both sides
// know both: nodes answer the former procedure, and clients ask nodes of the former release by it.

// Current is the procedure that has taken the place of one of the former release. Any other path stays as it is.
func Current(path string) string {
	for _, m := range methods() {
		if m.Former != "" && m.Former == path {
			return m.Procedure
		}
	}
	return path
}

// maxRefusal is more than a gate says when it refuses a call.
const maxRefusal = 1 << 10

// Former is the transport of a client that nodes of the former release answer, too. It sends a request again, with the
// former procedure, if the gate has refused it because it doesn't know the present one. The node has done nothing then,
// but its audit log has the refusal.
//
// What isn't covered: requests with several messages, which can't be sent twice, so no such method may have the option;
// and protocols other than Connect with POST, which no client of ours uses.
type Former struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (f Former) RoundTrip(r *http.Request) (*http.Response, error) {
	m := methods()[r.URL.Path]
	if m.Former == "" || r.Body == nil || r.ContentLength < 0 {
		return f.RoundTripper.RoundTrip(r)
	}
	body, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil {
		return nil, err
	}
	// A node may refuse a request before it has read it. So each attempt has a reader of its own.
	send := func(procedure string) (*http.Response, error) {
		attempt := r.Clone(r.Context())
		attempt.URL.Path = procedure
		attempt.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		attempt.Body, _ = attempt.GetBody()
		return f.RoundTripper.RoundTrip(attempt)
	}
	// A refusal has a length, also as the end of a stream, which has another status. Others have the same code.
	response, err := send(m.Procedure)
	refused := err == nil && (m.Streaming || response.StatusCode == http.StatusForbidden)
	if !refused || response.ContentLength <= 0 || response.ContentLength > maxRefusal {
		return response, err
	}
	answer, err := io.ReadAll(response.Body) // the transport ends it at that length
	response.Body.Close()
	if err != nil {
		return nil, err
	}
	if bytes.Contains(answer, []byte("no role may call POST "+m.Procedure)) {
		return send(m.Former)
	}
	response.Body = io.NopCloser(bytes.NewReader(answer))
	return response, nil
}
