package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

// Logging sends the logs of the node to other machines: those of its services, of the
// kernel, and the audit log of the API server.
type Logging struct {
	Destinations []LogDestination `yaml:"destinations" key:"endpoint"`
}

// LogDestination is a server that collects logs.
type LogDestination struct {
	// Endpoint is the server: tcp://host:port, udp://host:port, tls://host:port, or an http or
	// https URL, to which lines are posted. The node verifies certificates with the public
	// authorities and those that machine.files appends to /etc/ssl/certs/ca-certificates.
	// Required.
	Endpoint URL       `yaml:"endpoint"`
	Format   LogFormat `yaml:"format"` // default json_lines
	// ExtraTags are added to each line: to the fields of json_lines, to the structured data
	// of rfc5424.
	ExtraTags map[string]string `yaml:"extraTags"`
}

// Name is the endpoint without what may be secret.
func (d LogDestination) Name() string {
	u := d.Endpoint.URL
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return u.String()
}

// LogFormat is how a line is written.
type LogFormat string

const (
	LogJSONLines LogFormat = "json_lines" // a JSON object in each line
	LogRFC5424   LogFormat = "rfc5424"    // syslog; with octet counts (RFC 6587) on TCP and TLS
)

// LogFields are the fields of json_lines that each line has.
var LogFields = []string{"time", "host", "facility", "service", "level", "message"}

func checkLogging(c *Config, r *report) {
	seen := map[string]bool{}
	for i, d := range c.Machine.Logging.Destinations {
		where := at("machine", "logging", "destinations", i)
		if seen[d.Name()] {
			r.bad(where.with("endpoint"), "is also the endpoint of an earlier entry")
		}
		seen[d.Name()] = d.Endpoint != (URL{})
		if strings.HasPrefix(d.Endpoint.Scheme, "http") && d.Format == LogRFC5424 {
			r.bad(where.with("format"), "rfc5424 isn't sent over HTTP; use json_lines, or an endpoint with tcp, tls or udp")
		}
		for _, name := range LogFields {
			if _, is := d.ExtraTags[name]; is {
				r.bad(where.with("extraTags", name), "is a field that each line has; choose another name")
			}
		}
	}
}

func checkLogEndpoint(u URL) error {
	switch u.Scheme {
	case "http", "https":
		if u.Fragment != "" {
			return errors.New("a URL with # can't be posted to")
		}
	case "tcp", "udp", "tls":
		if strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
			return fmt.Errorf("must be a scheme, a host and a port only; did you mean %s://%s", u.Scheme, u.Host)
		} else if u.Port() == "" {
			return fmt.Errorf("lacks the port; did you mean %s://%s:514", u.Scheme, u.Host)
		}
	default:
		return fmt.Errorf("must be tcp, udp, tls, http or https, not %s%s", quote(u.Scheme), didYouMean(u.Scheme, []string{"tcp", "udp", "tls", "http", "https"}))
	}
	if n, err := strconv.Atoi(cmp.Or(u.Port(), "1")); err != nil || n < 1 || n > maxPort {
		return fmt.Errorf("%s is not a port (1 to %d)", quote(u.Port()), maxPort)
	}
	return checkHost(u.Hostname())
}

// Metrics has an address for Prometheus besides that of the machine API.
type Metrics struct {
	// Address is where the node serves its metrics with TLS: host:port or :port, for
	// https://host:port/metrics. A port from 1024 on that the node doesn't use otherwise.
	// The certificate is that of the machine API. Default: none, and metrics are at
	// /metrics of the machine API.
	Address string `yaml:"address"`
	// ClientCA is an authority whose client certificates may read metrics at this address,
	// besides those of the machine API with the role os:reader or more.
	ClientCA PEM `yaml:"clientCA"`
}

const (
	// firstPort is the first that a program without privileges may listen on.
	firstPort = 1024
	// Ports that programs of the node listen on: docs/ports.md has all of them.
	usedPorts = " 2379 2380 2381 7445 8472 10248 10249 10250 10256 10257 10259 50000 50001 "
)

func checkMetrics(c *Config, r *report) {
	m, where := c.Machine.Metrics, at("machine", "metrics")
	if len(m.ClientCA) > 0 {
		if m.Address == "" {
			r.lacks(where.with("address"), "clientCA is for clients of that address")
		}
		if cert, err := pki.ParseCert(m.ClientCA); err != nil {
			r.bad(where.with("clientCA"), "%v", err)
		} else if !cert.IsCA {
			r.bad(where.with("clientCA"), "is the certificate of %s, not of an authority", quote(cert.Subject.CommonName))
		}
	}
	if m.Address == "" {
		return
	}
	host, port, err := net.SplitHostPort(m.Address)
	n, portErr := strconv.Atoi(port)
	switch {
	case err != nil || portErr != nil || n < 1 || n > maxPort:
		r.bad(where.with("address"), "%s is not host:port or :port", quote(m.Address))
	case n < firstPort:
		r.bad(where.with("address"), "port %d is for programs with privileges; choose a port from %d on", n, firstPort)
	case strings.Contains(usedPorts, " "+port+" ") || n == c.Cluster.ControlPlane.LocalAPIServerPort:
		r.bad(where.with("address"), "another program of the node listens on port %d; choose another port", n)
	}
	if _, err := netip.ParseAddr(host); host != "" && err != nil {
		r.bad(where.with("address"), "%s is not an IP address of the node", quote(host))
	}
}
