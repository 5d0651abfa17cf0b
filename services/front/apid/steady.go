package apid

import (
	"io"
	"net/http"
	"time"
)

// stallTimeout is how long a reader may take nothing at all of what is sent. A person who
// reads a log through a pager may pause for longer: the client and the kernels between keep
// some megabytes.
const stallTimeout = 2 * time.Minute

// steady ends an answer that its reader doesn't take. Servers have a timeout for a
// whole answer only, and following a log has no end.
type steady struct {
	http.ResponseWriter
	limit   time.Duration
	stalled *time.Timer
	pace    func(bytes int) // waits until more may be sent than these; nil: it needn't
}

func newSteady(w http.ResponseWriter, limit time.Duration) *steady {
	s := &steady{ResponseWriter: w, limit: limit, stalled: time.AfterFunc(limit, func() {
		// What is being written fails at once.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
	})}
	s.pause()
	return s
}

// pause stops the clock: nothing is being written.
func (s *steady) pause() { s.stalled.Stop() }

// Write implements http.ResponseWriter.
func (s *steady) Write(p []byte) (int, error) {
	s.stalled.Reset(s.limit)
	n, err := s.ResponseWriter.Write(p)
	s.pause()
	if s.pace != nil {
		s.pace(n)
	}
	return n, err
}

// FlushError is what http.ResponseController looks for.
func (s *steady) FlushError() error {
	s.stalled.Reset(s.limit)
	defer s.pause()
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// Unwrap is what http.ResponseController looks for.
func (s *steady) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// upload is a large request, which has a time for each piece of it to come: a server has
// one for the whole. While PID 1 is busy and doesn't read, no timeout runs: HTTP/2 would
// end the call for good.
type upload struct {
	io.ReadCloser
	control *http.ResponseController
	piece   time.Duration
}

func newUpload(w http.ResponseWriter, body io.ReadCloser, piece time.Duration) *upload {
	u := &upload{body, http.NewResponseController(w), piece}
	u.pause()
	return u
}

// pause stops the clock. An error means that there is no connection any more.
func (u *upload) pause() { _ = u.control.SetReadDeadline(time.Time{}) }

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	_ = u.control.SetReadDeadline(time.Now().Add(u.piece))
	defer u.pause()
	return u.ReadCloser.Read(p)
}
