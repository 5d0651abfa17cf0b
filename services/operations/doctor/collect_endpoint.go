package doctor

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// askTimeout bounds one question over the network. Under emulation a handshake
	// takes a second.
	askTimeout = 3 * time.Second
	// resolveTimeout leaves time to ask what was resolved.
	resolveTimeout = 2 * time.Second
	// maxAddresses of an endpoint are asked: a name rarely has more.
	maxAddresses = 8
	// maxAnswer of a health check is shown; one that lists its checks has about 4 KB.
	maxAnswer = 8 << 10

	readyPath               = "/readyz"
	controllerManagerHealth = "https://127.0.0.1:10257/healthz"
	schedulerHealth         = "https://127.0.0.1:10259/readyz"
)

// endpoint is what was collected about cluster.controlPlane.endpoint.
type endpoint struct {
	url       string
	host      string
	addresses []netip.Addr
	resolve   error // why there are none
	answers   []answer
}

// answer is the result of one request over HTTPS.
type answer struct {
	from string // the URL, with the address where that isn't the host
	err  error  // no answer came, or the certificate wasn't accepted
	code int
	body string
	date time.Time // by the server's clock; zero: not in the answer
	took time.Duration
	// rejected is the certificate that was not accepted; nil: none was refused.
	rejected *x509.Certificate
}

// ok reports whether it serves.
func (a answer) ok() bool { return a.err == nil && a.code == http.StatusOK }

// text is the answer verbatim.
func (a answer) text() string {
	if a.err != nil {
		return a.from + ": " + a.err.Error()
	}
	return strings.TrimSpace(fmt.Sprintf("%s: %d %s: %s", a.from, a.code, http.StatusText(a.code), lastBad(a.body)))
}

// failedChecks are those of a list of checks.
func failedChecks(body string) []string {
	return slices.DeleteFunc(strings.Split(body, "\n"), func(line string) bool { return !strings.HasPrefix(line, "[-]") })
}

// lastBad picks, of a list of checks, those that fail.
func lastBad(body string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(body), "\n")
	return cmp.Or(strings.Join(failedChecks(body), "; "), first)
}

func (d *Doctor) collectEndpoint(ctx context.Context, s *snapshot) func(*snapshot) {
	u := s.config.Cluster.ControlPlane.Endpoint
	e := endpoint{url: strings.TrimSuffix(u.String(), "/"), host: u.Hostname()}
	if e.addresses, e.resolve = resolve(ctx, e.host); e.resolve != nil {
		return func(s *snapshot) { s.endpoint = &e }
	}
	e.answers = make([]answer, len(e.addresses))
	var wg sync.WaitGroup
	for i, addr := range e.addresses {
		wg.Go(func() {
			e.answers[i] = ask(ctx, e.url+readyPath, addr, &tls.Config{RootCAs: pki.Pool(s.config.Cluster.TrustedCAs())})
		})
	}
	wg.Wait()
	return func(s *snapshot) { s.endpoint = &e }
}

// collectLocal asks this node's apiserver for /readyz, which needs no authentication.
func (d *Doctor) collectLocal(ctx context.Context, s *snapshot) func(*snapshot) {
	o, err := secrets.Kubernetes.Get(d.o.Store, secrets.KubernetesID)
	if err != nil {
		return nil
	}
	a := ask(ctx, o.Spec.LocalEndpoint+readyPath, netip.Addr{}, &tls.Config{RootCAs: pki.Pool(s.config.Cluster.TrustedCAs())})
	return func(s *snapshot) { s.local = &a }
}

func (d *Doctor) collectNameServers(ctx context.Context, s *snapshot) func(*snapshot) {
	found := d.o.resolvers(ctx, d.o.Store, s.config)
	return func(s *snapshot) { s.servers = found }
}

func (d *Doctor) collectRegistries(ctx context.Context, s *snapshot) func(*snapshot) {
	found := d.o.registries(ctx, s.config)
	return func(s *snapshot) { s.images = found }
}

var otherPort = regexp.MustCompile(`:[0-9]+/`)

// collectPrograms asks the other two, on loopback. Their certificates are self-signed, so
// only their health is used.
func (d *Doctor) collectPrograms(ctx context.Context, known *snapshot) func(*snapshot) {
	var mu sync.Mutex // guards answers
	answers := map[string]answer{}
	var wg sync.WaitGroup
	for program, url := range d.o.programs {
		if _, _, extra := known.programConfig(program); extra.Get("secure-port") != "" {
			url = otherPort.ReplaceAllString(url, ":"+extra.Get("secure-port")+"/")
		}
		wg.Go(func() {
			a := ask(ctx, url, netip.Addr{}, &tls.Config{InsecureSkipVerify: true})
			mu.Lock()
			defer mu.Unlock()
			answers[program] = a
		})
	}
	wg.Wait()
	return func(s *snapshot) { s.programs = answers }
}

// resolve is the addresses of a host: itself, if it is one.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	found = lists.Of(found, netip.Addr.Unmap)
	slices.SortFunc(found, netip.Addr.Compare)
	found = slices.Compact(found)
	return found[:min(len(found), maxAddresses)], nil
}

// ask gets a URL, from that address if it is one, over a connection of its own.
func ask(ctx context.Context, target string, addr netip.Addr, config *tls.Config) answer {
	a := answer{from: target}
	u, err := url.Parse(target)
	if err != nil {
		a.err = err
		return a
	}
	config.MinVersion = tls.VersionTLS12
	dialer := net.Dialer{Timeout: askTimeout}
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true, DialContext: dialer.DialContext}
	if addr.IsValid() && addr.String() != u.Hostname() {
		a.from = target + " at " + addr.String()
		transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, net.JoinHostPort(addr.String(), cmp.Or(u.Port(), "443")))
		}
	}
	client := &http.Client{Transport: transport, Timeout: askTimeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		a.err = err
		return a
	}
	began := time.Now()
	resp, err := client.Do(req)
	a.took = time.Since(began)
	if err != nil {
		a.err = err
		if refused, ok := errors.AsType[*tls.CertificateVerificationError](err); ok && len(refused.UnverifiedCertificates) > 0 {
			a.rejected = refused.UnverifiedCertificates[0]
		}
		return a
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer)) // the code is enough
	a.code, a.body = resp.StatusCode, string(bytes.ToValidUTF8(body, []byte("\uFFFD")))
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		a.date = date
	}
	return a
}

// etcdHealth is where etcd serves its health, in plain HTTP on loopback.
const etcdHealth = "http://127.0.0.1:2381"

// member is what this node's etcd returns about itself and its cluster. What it doesn't
// answer is empty: ready says why.
type member struct {
	ready   answer
	members []*pb.Member
	alarms  []string // NOSPACE, CORRUPT
}

func (m *member) voters() int {
	return len(slices.DeleteFunc(slices.Clone(m.members), func(one *pb.Member) bool { return one.IsLearner }))
}

func describeMember(m *pb.Member) string {
	learner := ""
	if m.IsLearner {
		learner = " (learner)"
	}
	return fmt.Sprintf("etcd member %s %s%s", m.Name, m.PeerURLs, learner)
}

func (d *Doctor) collectEtcd(ctx context.Context, _ *snapshot) func(*snapshot) {
	m := &member{}
	var wg sync.WaitGroup
	wg.Go(func() { m.ready = ask(ctx, d.o.health+readyPath, netip.Addr{}, &tls.Config{}) })
	wg.Go(func() { d.listEtcd(ctx, m) }) // without a leader the first one hangs, and this doesn't
	wg.Wait()
	return func(s *snapshot) { s.etcd = m }
}

// listEtcd asks this node's member for all members and alarms. The first answer needs no
// leader.
func (d *Doctor) listEtcd(ctx context.Context, m *member) {
	status, err := etcd.Statuses.Get(d.o.Store, etcd.StatusID)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := etcd.Dial(ctx, d.o.Store, status.Spec.Endpoint)
	if err != nil {
		return
	}
	defer c.Close()
	found, err := c.MemberList(ctx, clientv3.WithSerializable())
	if err != nil {
		return
	}
	m.members = found.Members
	if alarms, err := c.AlarmList(ctx); err == nil {
		m.alarms = lists.Of(alarms.Alarms, func(a *pb.AlarmMember) string { return a.Alarm.String() })
	}
}
