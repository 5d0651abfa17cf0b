package network

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// firstMirrorPort is the port after the registry's. Each mirror has a port of its own.
const firstMirrorPort = registryPort + 1

// Mirror is a registry outside of the network. Nodes can't connect to it, so the host process
// forwards their requests.
//
//	node ── http ─► gateway:Port, host process ── http or https ─► URL
type Mirror struct {
	Host string `json:"host"` // the registry whose images it has, or "*"
	URL  string `json:"url"`
	Port int    `json:"port"` // the same for the same URL
}

// NewMirrors returns the mirrors of registries, by host, and gives each URL a port.
func NewMirrors(urls map[string][]string) (all []Mirror, err error) {
	ports := map[string]int{}
	for _, host := range slices.Sorted(maps.Keys(urls)) {
		for _, text := range urls[host] {
			u, err := url.Parse(text)
			if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
				return nil, fmt.Errorf("registry mirror of %s: %q: must be a URL such as http://127.0.0.1:5000", host, text)
			}
			if ports[text] == 0 {
				ports[text] = firstMirrorPort + len(ports)
			}
			all = append(all, Mirror{Host: host, URL: text, Port: ports[text]})
		}
	}
	return all, nil
}

// Address returns where nodes of a network find the mirror.
func (m Mirror) Address(network netip.Prefix) netip.AddrPort {
	return netip.AddrPortFrom(Gateway(network), uint16(m.Port))
}

// ServeMirrors forwards the nodes' requests until the returned function is called.
func (l *LAN) ServeMirrors() (closeAll func(), err error) {
	var open []net.Listener
	closeAll = func() {
		for _, o := range open {
			o.Close()
		}
	}
	served := map[int]bool{}
	for _, m := range l.config.Mirrors {
		if served[m.Port] {
			continue
		}
		served[m.Port] = true
		to, err := m.target(l.config.Prefix, l.config.Host)
		var port net.Listener
		if err == nil {
			port, err = l.Listen(m.Address(l.config.Prefix))
		}
		if err != nil {
			closeAll()
			return nil, fmt.Errorf("mirror %s: %w", m.URL, err)
		}
		open = append(open, port)
		go serve(port, proxy(to, l.log), l.log)
	}
	return closeAll, nil
}

// target is where requests go. host is where this machine is; "": here. Users write the gateway's address, or their
// own, for a registry that runs on this machine.
func (m Mirror) target(network netip.Prefix, host string) (*url.URL, error) {
	to, err := url.Parse(m.URL)
	if err != nil {
		return nil, err
	}
	at, _ := netip.ParseAddr(to.Hostname())
	own := at.IsLoopback() || to.Hostname() == "localhost"
	if at == Gateway(network) || own && host != "" {
		host, port := cmp.Or(host, "127.0.0.1"), to.Port()
		if to.Host = host; port != "" {
			to.Host = net.JoinHostPort(host, port)
		}
	}
	return to, nil
}

// proxy forwards requests for reading, without cookies.
func proxy(to *url.URL, log *slog.Logger) http.Handler {
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: to.Scheme, Host: to.Host})
			r.Out.URL.User, r.Out.URL.Path, r.Out.URL.RawPath = to.User, config.RegistryPath(*to, false)+strings.TrimPrefix(r.In.URL.Path, "/v2"), ""
			r.Out.Header.Del("Cookie")
		},
		Transport:      following{},
		ModifyResponse: func(r *http.Response) error { r.Header.Del("Set-Cookie"); return nil },
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			log.Warn("mirror", "error", err)
			http.Error(w, err.Error(), http.StatusBadGateway)
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			http.Error(w, "mirrors are read-only", http.StatusMethodNotAllowed)
			return
		}
		forward.ServeHTTP(w, r)
	})
}

// following follows redirects, because nodes can't connect to the other server.
type following struct{}

func (following) RoundTrip(r *http.Request) (*http.Response, error) {
	r.RequestURI = "" // a client's request has none
	return http.DefaultClient.Do(r)
}
