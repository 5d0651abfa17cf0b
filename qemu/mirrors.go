package qemu

import (
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
)

// firstMirrorPort is the one above the registry's; one mirror is served on each.
const firstMirrorPort = registryPort + 1

// Mirror is a registry that the user has somewhere, as nodes find it: they reach no
// other machine than this one, so this one asks for them.
//
//	node ── http ─► gateway:Port, host process ── http or https ─► URL
type Mirror struct {
	Host string `json:"host"` // the registry that it is asked instead of, or "*"
	URL  string `json:"url"`
	Port int    `json:"port"` // the same for the same URL
}

// planMirrors gives each mirror a port.
func planMirrors(o Options) (all []Mirror, err error) {
	ports := map[string]int{}
	for _, host := range slices.Sorted(maps.Keys(o.Mirrors)) {
		for _, text := range o.Mirrors[host] {
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

// mirrors are those of a node's configuration. They end with the registry that has what
// was built.
func (p Plan) mirrors() map[string][]string {
	all := map[string][]string{}
	for _, m := range p.Mirrors {
		all[m.Host] = append(all[m.Host], "http://"+p.mirrorAddress(m).String())
	}
	all["*"] = append(all["*"], "http://"+p.registryAddress().String())
	return all
}

func (p Plan) mirrorAddress(m Mirror) netip.AddrPort {
	return netip.AddrPortFrom(gateway(p.Network), uint16(m.Port))
}

// serveMirrors hands the nodes' questions on until the returned function is called.
func (l *lan) serveMirrors() (closeAll func(), err error) {
	var open []net.Listener
	closeAll = func() {
		for _, o := range open {
			o.Close()
		}
	}
	served := map[int]bool{}
	for _, m := range l.plan.Mirrors {
		if served[m.Port] {
			continue
		}
		served[m.Port] = true
		to, err := m.proxy(l.plan, l.log)
		var port net.Listener
		if err == nil {
			port, err = l.Listen(l.plan.mirrorAddress(m))
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

// mirrorProxy asks a registry for what nodes ask it.
type mirrorProxy struct {
	to     *url.URL
	client *http.Client
	log    *slog.Logger
}

func (m Mirror) proxy(p Plan, log *slog.Logger) (http.Handler, error) {
	to, err := url.Parse(m.URL)
	if err != nil {
		return nil, err
	}
	// On a network where this machine's first address is the gateway's, users know a
	// registry of this machine by that.
	if at, err := netip.ParseAddr(to.Hostname()); err == nil && at == gateway(p.Network) {
		to.Host = net.JoinHostPort("127.0.0.1", to.Port())
		if to.Port() == "" {
			to.Host = "127.0.0.1"
		}
	}
	// It follows where the registry sends: nodes couldn't.
	return mirrorProxy{to: to, client: &http.Client{}, log: log}, nil
}

// What is handed on are the headers that the OCI distribution specification knows.
var (
	askedHeaders    = []string{"Accept", "Authorization", "Range", "If-None-Match", "User-Agent"}
	answeredHeaders = []string{"Content-Type", "Content-Length", "Content-Range", "Accept-Ranges", "Docker-Content-Digest",
		"Docker-Distribution-Api-Version", "Etag", "Link", "Www-Authenticate"}
)

func (p mirrorProxy) ServeHTTP(w http.ResponseWriter, asked *http.Request) {
	if asked.Method != http.MethodGet && asked.Method != http.MethodHead {
		http.Error(w, "mirrors are read-only", http.StatusMethodNotAllowed)
		return
	}
	to := *p.to
	to.Path = strings.TrimSuffix(to.Path, "/") + asked.URL.Path
	to.RawQuery = asked.URL.RawQuery
	question, err := http.NewRequestWithContext(asked.Context(), asked.Method, to.String(), nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	copyHeaders(question.Header, asked.Header, askedHeaders)
	answer, err := p.client.Do(question)
	if err != nil {
		p.log.Warn("mirror", "error", err)
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer answer.Body.Close()
	copyHeaders(w.Header(), answer.Header, answeredHeaders)
	w.WriteHeader(answer.StatusCode)
	_, _ = io.Copy(w, answer.Body) // an error is one end's, which went away
}

func copyHeaders(to, from http.Header, names []string) {
	for _, name := range names {
		for _, value := range from.Values(name) {
			to.Add(name, value)
		}
	}
}
