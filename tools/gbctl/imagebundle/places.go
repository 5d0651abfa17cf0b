package imagebundle

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// place is an image at a registry.
type place struct {
	ref  name.Reference
	root string // the path of the registry's API; "": /v2
}

// below asks a registry whose API isn't at /v2.
type below struct {
	http.RoundTripper
	at place
}

func (b below) RoundTrip(r *http.Request) (*http.Response, error) {
	if rest, ok := strings.CutPrefix(r.URL.Path, "/v2/"); ok && r.URL.Host == b.at.ref.Context().RegistryStr() {
		r = r.Clone(r.Context())
		r.URL.Path = b.at.root + "/" + rest
	}
	return b.RoundTripper.RoundTrip(r)
}

// mirrored is an image at a mirror: the host of the registry is replaced, and the path stays, as nodes do it.
func mirrored(ref name.Reference, mirror string) (at place, err error) {
	u, err := url.Parse(mirror)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return at, fmt.Errorf("registry %q: must be a URL such as http://10.5.0.1:5000", mirror)
	}
	var options []name.Option
	if u.Scheme == "http" {
		options = append(options, name.Insecure)
	}
	repository, root := ref.Context().RepositoryStr(), config.RegistryPath(*u, false)
	if project, ok := strings.CutPrefix(root+"/", "/v2/"); ok {
		repository = path.Join(project, repository)
	} else {
		at.root = root
	}
	separator := ":"
	if _, digest := ref.(name.Digest); digest {
		separator = "@"
	}
	at.ref, err = name.ParseReference(u.Host+"/"+repository+separator+ref.Identifier(), options...)
	return at, err
}

// places are where an image may be: the mirrors of its registry, and then the registry.
func (b Bundle) places(ref name.Reference) (places []place, err error) {
	host := ref.Context().RegistryStr()
	if host == name.DefaultRegistry {
		host = "docker.io"
	}
	urls := b.Mirrors[host]
	if len(urls) == 0 {
		urls = b.Mirrors["*"]
	}
	for _, text := range urls {
		at, err := mirrored(ref, text)
		if err != nil {
			return nil, err
		}
		places = append(places, at)
	}
	return append(places, place{ref: ref}), nil
}

// options are those of all requests. Credentials are those of docker login and podman login.
func (b Bundle) options(ctx context.Context, at place) []remote.Option {
	by := b.transport
	if by == nil {
		by = patient
	}
	if at.root != "" {
		by = below{by, at}
	}
	return []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain), remote.WithTransport(by)}
}

// silenceWait is for the next bytes of a registry, also for the first ones of an answer: a cache may fetch the content
// first.
const silenceWait = time.Minute

// patient is how images are pulled and pushed: a registry that hangs is given up.
var patient = patientTransport(silenceWait)

func patientTransport(silence time.Duration) http.RoundTripper {
	const dial, handshake = 30 * time.Second, 10 * time.Second
	dialer := net.Dialer{Timeout: dial}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true, TLSHandshakeTimeout: handshake,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return patientConn{c, address, silence}, nil
		},
	}
}

// patientConn ends when nothing comes, and nothing goes, for some time.
type patientConn struct {
	net.Conn
	address string
	silence time.Duration
}

func (c patientConn) Read(p []byte) (n int, err error) {
	if err = c.SetReadDeadline(time.Now().Add(c.silence)); err == nil {
		n, err = c.Conn.Read(p)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%s has sent nothing for %s", c.address, c.silence)
	}
	return n, err
}

func (c patientConn) Write(p []byte) (n int, err error) {
	// In an upload, nothing comes while much goes: a Read that waits gets more time, too.
	if err = c.SetDeadline(time.Now().Add(c.silence)); err == nil {
		n, err = c.Conn.Write(p)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%s has taken nothing for %s", c.address, c.silence)
	}
	return n, err
}
