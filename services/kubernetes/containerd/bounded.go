package containerd

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"
)

// A registry that hangs is given up, so that another mirror is asked, the node says what is wrong, and the pull begins anew.
const (
	// answerWait is for the beginning of an answer. A cache may fetch the content first.
	answerWait = time.Minute
	// silenceWait is for the next bytes of an answer.
	silenceWait = time.Minute
)

// bounded ends answers that don't go on.
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
	silent := fmt.Errorf("%s has sent nothing for %s: i/o timeout", r.URL.Host, b.silence)
	a := &answerBody{ReadCloser: answer.Body, ctx: ctx, cancel: cancel, silence: b.silence}
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
}

func (a *answerBody) Read(p []byte) (int, error) {
	a.timer.Reset(a.silence)
	n, err := a.ReadCloser.Read(p)
	a.timer.Stop()
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
