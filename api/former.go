package api

import (
	"bytes"
	"cmp"
	"io"
	"net/http"
	"sync"
)

// A method that has another procedure than in the former release has the option former. For one release, both sides
// know both names by that option: nodes answer the former one, and clients ask nodes of the former release by it.

var current = sync.OnceValue(func() map[string]string {
	procedures := map[string]string{}
	for _, m := range methods() {
		if m.Former != "" {
			procedures[m.Former] = m.Procedure
		}
	}
	return procedures
})

// Current is the procedure that has taken the place of one of the former release. Any other path stays as it is.
func Current(path string) string { return cmp.Or(current()[path], path) }

// Former is a client's transport, for nodes of this release and of the former one. A request is sent again, with the
// procedure of the former release, if the node has refused it because it doesn't know the present one: it did nothing,
// but its audit log has the refusal. A request whose length isn't known, a stream, is sent once: no method that
// receives one may have the option. Nor does it work for clients that speak gRPC: ours don't.
type Former struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (f Former) RoundTrip(r *http.Request) (*http.Response, error) {
	m := methods()[r.URL.Path]
	if m.Former == "" || r.ContentLength < 0 || r.Body == nil {
		return f.RoundTripper.RoundTrip(r)
	}
	// The first attempt may still read its body while the second one is sent: each has its own.
	body, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil {
		return nil, err
	}
	send := func(procedure string) (*http.Response, error) {
		own := r.Clone(r.Context())
		own.URL.Path = procedure
		own.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		own.Body, _ = own.GetBody()
		return f.RoundTripper.RoundTrip(own)
	}
	response, err := send(m.Procedure)
	if err != nil {
		return nil, err
	}
	unknown, err := refusedAsUnknown(response)
	switch {
	case err != nil:
		return nil, err
	case unknown:
		return send(m.Former)
	}
	return response, nil
}

// maxRefusal is larger than a refusal of the gate is.
const maxRefusal = 1 << 10

// refusedAsUnknown reports whether the gate of the former release has refused a request because it doesn't know the
// procedure. Its words are what tells: for the code, it could be the caller's role. They are in a whole answer, whose
// length is known, also where a stream was asked for.
func refusedAsUnknown(response *http.Response) (bool, error) {
	if response.ContentLength <= 0 || response.ContentLength > maxRefusal {
		return false, nil
	}
	body, err := io.ReadAll(response.Body) // the transport ends it at that length
	response.Body.Close()
	response.Body = io.NopCloser(bytes.NewReader(body))
	return bytes.Contains(body, []byte("no role may call POST /")), err
}
