package network

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
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
		to, err := m.proxy(l.config.Prefix, l.config.Host, l.log)
		var port net.Listener
		if err == nil {
			port, err = l.Listen(m.Address(l.config.Prefix))
		}
		if err != nil {
			closeAll()
			return nil, fmt.Errorf("mirror %s: %w", m.URL, err)
		}
		open = append(open, port)
		go serve(port, to, l.log)
	}
	return closeAll, nil
}

// mirrorProxy forwards requests of nodes to a registry.
type mirrorProxy struct {
	to     *url.URL
	client *http.Client
	log    *slog.Logger
}

// proxy forwards to a mirror. host is where this machine is; "": here.
func (m Mirror) proxy(network netip.Prefix, host string, log *slog.Logger) (http.Handler, error) {
	to, err := url.Parse(m.URL)
	if err != nil {
		return nil, err
	}
	// Users write the gateway's address, or their own, for a registry that runs on this machine.
	at, _ := netip.ParseAddr(to.Hostname())
	own := at.IsLoopback() || to.Hostname() == "localhost"
	if at == Gateway(network) || own && host != "" {
		host, port := cmp.Or(host, "127.0.0.1"), to.Port()
		if to.Host = host; port != "" {
			to.Host = net.JoinHostPort(host, port)
		}
	}
	// The client follows redirects, because nodes can't connect to the other server.
	return mirrorProxy{to: to, client: &http.Client{}, log: log}, nil
}

// These headers of the OCI distribution specification are forwarded.
var (
	requestHeaders  = []string{"Accept", "Authorization", "Range", "If-None-Match", "User-Agent"}
	responseHeaders = []string{"Content-Type", "Content-Length", "Content-Range", "Accept-Ranges", "Docker-Content-Digest",
		"Docker-Distribution-Api-Version", "Etag", "Link", "Www-Authenticate"}
)

func (p mirrorProxy) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		http.Error(w, "mirrors are read-only", http.StatusMethodNotAllowed)
		return
	}
	to := *p.to
	to.Path = config.RegistryPath(to, false) + strings.TrimPrefix(request.URL.Path, "/v2")
	to.RawQuery = request.URL.RawQuery
	forwarded, err := http.NewRequestWithContext(request.Context(), request.Method, to.String(), nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	copyHeaders(forwarded.Header, request.Header, requestHeaders)
	response, err := p.client.Do(forwarded)
	if err != nil {
		p.log.Warn("mirror", "error", err)
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer response.Body.Close()
	copyHeaders(w.Header(), response.Header, responseHeaders)
	w.WriteHeader(response.StatusCode)
	_, _ = io.Copy(w, response.Body) // an error means that one end has closed its connection
}

func copyHeaders(to, from http.Header, names []string) {
	for _, name := range names {
		for _, value := range from.Values(name) {
			to.Add(name, value)
		}
	}
}
