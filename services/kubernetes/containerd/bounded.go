package containerd

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"
)

// A registry that hangs is given up, so that another mirror is asked, the node says what is wrong, and the pull begins
// anew.
const (
	// answerWait is for the beginning of an answer. A cache may fetch the content first.
	answerWait = time.Minute
	// silenceWait is for the next leastBytes of an answer, or for its end. A registry that sends less is as good as
	// silent: no image would ever arrive.
	silenceWait = time.Minute
	leastBytes  = 64 << 10
)

// bounded ends answers that don't go on. How long a whole answer takes is not limited.
type bounded struct {
	*http.Transport
	silence time.Duration
}

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	answer, err := b.Transport.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	silent := fmt.Errorf("%s has sent less than %d KiB within %s: i/o timeout", r.URL.Host, leastBytes>>10, b.silence)
	a := &answerBody{ReadCloser: answer.Body, ctx: ctx, cancel: cancel, silence: b.silence, left: b.silence}
	a.timer = time.AfterFunc(b.silence, func() { cancel(silent) })
	a.timer.Stop() // it runs while bytes are waited for
	answer.Body = a
	return answer, nil
}

// answerBody is the content of an answer.
type answerBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	silence time.Duration
	left    time.Duration // of silence, for the rest of leastBytes
	got     int           // of leastBytes
}

func (a *answerBody) Read(p []byte) (int, error) {
	begun := time.Now()
	a.timer.Reset(a.left)
	n, err := a.ReadCloser.Read(p)
	a.timer.Stop()
	a.left -= time.Since(begun) // the time between reads is the reader's
	if a.got += n; a.got >= leastBytes {
		a.left, a.got = a.silence, 0
	}
	if err != nil && a.ctx.Err() != nil {
		err = context.Cause(a.ctx)
	}
	return n, err
}

func (a *answerBody) Close() error {
	a.timer.Stop()
	a.cancel(nil)
	return a.ReadCloser.Close()
}
