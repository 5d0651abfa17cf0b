package source

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const (
	// fetchAttempts with waits that double from fetchWait give a server and the
	// network a minute to start; then the caller decides.
	fetchAttempts = 8
	fetchWait     = 500 * time.Millisecond
	fetchWaitMax  = 30 * time.Second
	// fetchTimeout is for one attempt: a megabyte over a slow connection.
	fetchTimeout = 30 * time.Second
)

// Waiter waits for a duration, or returns the reason why it can't.
type Waiter func(context.Context, time.Duration) error

var (
	// errFinal marks answers for which a retry is useless, and errNotThere those of them that
	// are 404.
	errFinal    = errors.New("asking again won't help")
	errNotThere = fmt.Errorf("%w", errFinal)
)

// A request is what fetch sends; its method is GET by default.
type request struct {
	method, url string
	header      http.Header
	expand      func(location string) (string, error) // fills in variables; nil: there are none
}

func (r request) address() (*url.URL, error) {
	location := r.url
	if r.expand != nil {
		var err error
		if location, err = r.expand(location); err != nil {
			return nil, err
		}
	}
	u, err := url.Parse(location)
	if err != nil {
		return nil, errors.New("not a URL") // the error would contain a password
	}
	return u, nil
}

// CheckSum compares a document with the SHA-256 in the fragment of its URL, if there is one:
// https://example.org/a.yaml#sha256=0123…
func CheckSum(u *url.URL, document []byte) error {
	if sum := fmt.Sprintf("sha256=%x", sha256.Sum256(document)); u.Fragment != "" && !strings.EqualFold(u.Fragment, sum) {
		return fmt.Errorf("the document has #%s, and its URL demands #%s", sum, u.Fragment)
	}
	return nil
}

// maxRedirects is that of net/http.
const maxRedirects = 10

// StayEncrypted is for http.Client.CheckRedirect: what was asked for over TLS doesn't come
// without.
func StayEncrypted(req *http.Request, via []*http.Request) error {
	if last := via[len(via)-1].URL; last.Scheme == "https" && req.URL.Scheme != "https" || len(via) >= maxRedirects {
		return fmt.Errorf("%w: %s leads to %s, which isn't encrypted, or is the redirect %d", errFinal, last.Redacted(), req.URL.Redacted(), len(via))
	}
	return nil
}

// fetch gets a document over HTTP. It retries while the failure may be
// temporary. Errors show the URL without its password.
func fetch(ctx context.Context, client *http.Client, wait Waiter, r request) ([]byte, error) {
	pause := fetchWait
	for attempt := 1; ; attempt++ {
		u, err := r.address()
		switch {
		case err == nil:
			var data []byte
			if data, err = fetchOnce(ctx, client, u, r); err == nil {
				return data, nil
			}
			err = fmt.Errorf("get %s: %w", u.Redacted(), err)
		case !errors.Is(err, errNoHostname) && !errors.Is(err, errNoInterface): // wait has the network start
			return nil, err
		}
		if errors.Is(err, errFinal) || errors.Is(err, errTooLarge) || ctx.Err() != nil {
			return nil, err
		}
		if attempt == fetchAttempts {
			return nil, fmt.Errorf("%w (tried %d times)", err, attempt)
		}
		if waitErr := wait(ctx, pause); waitErr != nil {
			return nil, errors.Join(err, waitErr)
		}
		pause = min(2*pause, fetchWaitMax)
	}
}

func fetchOnce(ctx context.Context, client *http.Client, u *url.URL, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errFinal)
	}
	maps.Copy(req.Header, r.header)
	strict := *client
	strict.CheckRedirect = StayEncrypted
	resp, err := strict.Do(req)
	if err != nil {
		if inner, ok := errors.AsType[*url.Error](err); ok {
			err = inner.Err // the outer error repeats method and URL
		}
		return nil, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
		data, err := readLimited(resp.Body)
		return data, cmp.Or(err, CheckSum(u, data))
	case resp.StatusCode == http.StatusNotFound:
		return nil, fmt.Errorf("%s: %w", resp.Status, errNotThere)
	case resp.StatusCode >= 400 && resp.StatusCode < 500 && resp.StatusCode != http.StatusRequestTimeout && resp.StatusCode != http.StatusTooManyRequests:
		return nil, fmt.Errorf("%s: %w", resp.Status, errFinal)
	}
	return nil, errors.New(resp.Status)
}
