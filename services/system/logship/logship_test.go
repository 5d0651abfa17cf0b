package logship

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rig is a node with a forwarder.
type rig struct {
	t     *testing.T
	store *resource.Store
	logs  *logs.Logs
	o     Options
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{t: t, store: resource.NewStore(), logs: logs.New(nil)}
	must(t, network.Hostnames.Put(r.store.As("test"), network.HostnameID, "node-1"))
	r.o = Options{
		Store: r.store, Logs: r.logs, AuditLog: filepath.Join(dir, "audit", "kube-apiserver.log"),
		first: 10 * time.Millisecond, flush: 100 * time.Millisecond,
	}
	must(t, os.Mkdir(filepath.Dir(r.o.AuditLog), 0o700))
	return r
}

// run runs the forwarder until the test ends.
func (r *rig) run() {
	stop := background.Start(context.Background(), New(r.o).Run)
	r.t.Cleanup(stop)
}

func (r *rig) configure(destinations ...config.LogDestination) {
	r.t.Helper()
	c := &config.Config{}
	c.Machine.Logging.Destinations = destinations
	c.FillDefaults()
	must(r.t, configuration.Configs.Put(r.store.As("machined"), configuration.ConfigID, c))
}

func (r *rig) state(d config.LogDestination) Destination {
	o, err := Destinations.Get(r.store, d.Name())
	if err != nil {
		return Destination{}
	}
	return o.Spec
}

// wait waits for a state.
func (r *rig) wait(what string, d config.LogDestination, holds func(Destination) bool) {
	r.t.Helper()
	eventually.That(r.t, 20*time.Second, what, func() error {
		if s := r.state(d); !holds(s) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

func target(t *testing.T, endpoint string, format config.LogFormat) config.LogDestination {
	t.Helper()
	u, err := config.ParseURL(endpoint)
	must(t, err)
	return config.LogDestination{Endpoint: u, Format: format, ExtraTags: map[string]string{"rack": `r"1]2\`}}
}

// collector keeps lines that have arrived.
type collector struct {
	t     *testing.T
	mu    sync.Mutex
	lines []line
}

// line is a line in either format.
type line struct{ host, facility, service, level, message, rack string }

func (c *collector) add(l line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, l)
}

// of are the messages of a service.
func (c *collector) of(service string) (messages []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.lines {
		if l.service == service {
			messages = append(messages, l.message)
		}
	}
	return messages
}

func (c *collector) wait(service string, want ...string) {
	c.t.Helper()
	eventually.That(c.t, 20*time.Second, "lines of "+service, func() error {
		if diff := cmp.Diff(want, c.of(service)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// json reads a line of json_lines strictly.
func (c *collector) json(text string) {
	var f map[string]string
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		c.t.Errorf("%q: %v", text, err)
		return
	}
	at, err := time.Parse(time.RFC3339Nano, f["time"])
	if err != nil || time.Since(at).Abs() > time.Hour || len(f) != len(config.LogFields)+1 {
		c.t.Errorf("%q: %v", text, err)
	}
	c.add(line{f["host"], f["facility"], f["service"], f["level"], f["message"], f["rack"]})
}

var syslogMessage = regexp.MustCompile(`^<(\d{1,3})>1 (\S{26}Z|\S+Z) ([!-~]{1,255}) ([!-~]{1,48}) - ([!-~]{1,32}) (-|\[tags@32473 rack="((?:[^"\\\]]|\\["\\\]])*)"\]) (.*)$`)

// syslog reads a message of RFC 5424 strictly.
func (c *collector) syslog(text string) {
	m := syslogMessage.FindStringSubmatch(text)
	if m == nil {
		c.t.Errorf("%q isn't a message of RFC 5424", text)
		return
	}
	if at, err := time.Parse("2006-01-02T15:04:05.000000Z", m[2]); err != nil || time.Since(at).Abs() > time.Hour {
		c.t.Errorf("time %q: %v", m[2], err)
	}
	pri, err := strconv.Atoi(m[1])
	facility := map[int]string{0: "kernel", 3: "service", 13: "audit"}[pri/8]
	if err != nil || facility != m[5] {
		c.t.Errorf("%q: facility %q", text, facility)
	}
	rack := strings.NewReplacer(`\"`, `"`, `\]`, `]`, `\\`, `\`).Replace(m[7])
	c.add(line{m[3], facility, m[4], levels[pri%8], m[8], rack})
}

// lines reads lines of JSON, octets messages of RFC 5424 by RFC 6587.
func (c *collector) readLines(r io.Reader) {
	for s := bufio.NewScanner(r); s.Scan(); {
		c.json(s.Text())
	}
}

func (c *collector) readOctets(r io.Reader) {
	b := bufio.NewReader(r)
	for {
		count, err := b.ReadString(' ')
		if err != nil {
			return
		}
		n, err := strconv.Atoi(strings.TrimSuffix(count, " "))
		if err != nil {
			c.t.Errorf("octet count %q", count)
			return
		}
		text := make([]byte, n)
		if _, err := io.ReadFull(b, text); err != nil {
			return
		}
		c.syslog(string(text))
	}
}

// server is a TCP server that can be stopped and started again at its address.
type server struct {
	t       *testing.T
	address string
	read    func(io.Reader)
	ln      net.Listener
	mu      sync.Mutex
	conns   []net.Conn
	wg      sync.WaitGroup
}

func newServer(t *testing.T, read func(io.Reader)) *server {
	t.Helper()
	s := &server{t: t, address: "127.0.0.1:0", read: read}
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *server) start() {
	s.t.Helper()
	eventually.That(s.t, 10*time.Second, "listener", func() (err error) {
		s.ln, err = net.Listen("tcp", s.address)
		return err
	})
	s.address = s.ln.Addr().String()
	ln := s.ln
	s.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			s.wg.Go(func() { s.read(conn) })
		}
	})
}

func (s *server) stop() {
	s.ln.Close()
	s.mu.Lock()
	for _, conn := range s.conns {
		conn.Close()
	}
	s.conns = nil
	s.mu.Unlock()
	s.wg.Wait()
}

func TestAllSourcesInBothFormats(t *testing.T) {
	for _, format := range []config.LogFormat{config.LogJSONLines, config.LogRFC5424} {
		t.Run(string(format), func(t *testing.T) {
			r, c := newRig(t), &collector{t: t}
			read := c.readLines
			if format == config.LogRFC5424 {
				read = c.readOctets
			}
			s := newServer(t, read)
			r.logs.Logger("etcd").Warn("before the configuration", "n", 1)
			kernel := filepath.Join(t.TempDir(), "kmsg")
			must(t, unix.Mkfifo(kernel, 0o600))
			kmsg, err := os.OpenFile(kernel, os.O_RDWR, 0)
			must(t, err)
			t.Cleanup(func() { kmsg.Close() })
			_, err = kmsg.WriteString("2,7,30000000,-;Out of memory\n")
			must(t, err)
			t.Cleanup(background.Start(context.Background(), func(ctx context.Context) {
				_ = r.logs.FollowKernel(ctx, kernel, func() time.Duration { return time.Minute })
			}))
			r.configure(target(t, "tcp://"+s.address, format))
			r.run()
			eventually.That(t, 20*time.Second, "a line of the kernel", func() error {
				if len(c.of("kernel")) == 0 {
					return errors.New("nothing of the kernel")
				}
				return nil
			})
			must(t, os.WriteFile(r.o.AuditLog, []byte(`{"kind":"Event","level":"Metadata"}`+"\n"), 0o600))
			w := r.logs.Writer("kubelet")
			_, err = w.Write([]byte("raw \xff bytes <a> \"q\"\n"))
			must(t, err)
			c.wait("kubelet", "raw \uFFFD bytes <a> \"q\"")
			c.wait("kube-apiserver", `{"kind":"Event","level":"Metadata"}`)
			c.mu.Lock()
			defer c.mu.Unlock()
			got := map[string]line{}
			for _, l := range c.lines {
				got[l.service] = l
			}
			delete(got, LogID)
			delete(got, logs.ConsoleID)
			const rack = `r"1]2\`
			want := map[string]line{
				"etcd":           {"node-1", "service", "etcd", "warning", "before the configuration n=1", rack},
				"kernel":         {"node-1", "kernel", "kernel", "critical", "Out of memory", rack},
				"kube-apiserver": {"node-1", "audit", "kube-apiserver", "info", `{"kind":"Event","level":"Metadata"}`, rack},
				"kubelet":        {"node-1", "service", "kubelet", "info", "raw \uFFFD bytes <a> \"q\"", rack},
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(line{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDatagrams(t *testing.T) {
	r, c := newRig(t), &collector{t: t}
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1<<16)
		for {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			c.syslog(string(buf[:n]))
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	d := target(t, "udp://"+conn.LocalAddr().String(), config.LogRFC5424)
	r.configure(d)
	r.run()
	r.logs.Logger("etcd").Info("one")
	r.logs.Logger("etcd").Info(strings.Repeat("x", 2*maxDatagram))
	c.wait("etcd", "one", strings.Repeat("x", maxDatagram))
	r.wait("two lines and the own one", d, func(s Destination) bool { return s.Sending && s.Sent >= 3 && s.Dropped == 0 })
}

// A batch that the server didn't take is sent again, one that it refuses isn't.
func TestPosts(t *testing.T) {
	r, c := newRig(t), &collector{t: t}
	var mu sync.Mutex
	first := true
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if user, password, _ := req.BasicAuth(); user != "node" || password != "geheim" || req.Method != http.MethodPost || req.URL.RawQuery != "key=geheim" ||
			req.Header.Get("Content-Type") != "application/x-ndjson" {
			t.Errorf("request %s %s %v", req.Method, req.URL, req.Header)
		}
		body, err := io.ReadAll(req.Body)
		switch {
		case err != nil:
			t.Error(err)
		case first:
			first = false
			w.WriteHeader(http.StatusServiceUnavailable)
		case strings.Contains(string(body), `"two"`):
			w.WriteHeader(http.StatusBadRequest)
		default:
			c.readLines(bytes.NewReader(body))
		}
	}))
	t.Cleanup(s.Close)
	d := target(t, strings.Replace(s.URL, "http://", "http://node:geheim@", 1)+"/logs?key=geheim", config.LogJSONLines)
	r.logs.Logger("etcd").Info("one")
	r.configure(d)
	r.run()
	c.wait("etcd", "one")
	r.logs.Logger("etcd").Info("two")
	r.wait("a refused line", d, func(s Destination) bool { return s.Dropped > 0 && strings.HasSuffix(s.Error, "HTTP 400 Bad Request") })
	r.logs.Logger("etcd").Info("three")
	c.wait("etcd", "one", "three")
	r.wait("sending", d, func(s Destination) bool { return s.Sending })
	for _, o := range Destinations.List(r.store) {
		if text := fmt.Sprint(o.ID, o.Spec, r.logs.Tail(LogID, 0)); strings.Contains(text, "geheim") || !strings.Contains(text, s.URL+"/logs") {
			t.Errorf("%s", text)
		}
	}
}

// Lines of an outage arrive after it; a live change of settings loses none.
func TestOutageAndChange(t *testing.T) {
	r, c := newRig(t), &collector{t: t}
	s := newServer(t, c.readLines)
	d := target(t, "tcp://"+s.address, config.LogJSONLines)
	r.configure(d)
	r.run()
	r.logs.Logger("etcd").Info("one")
	c.wait("etcd", "one")
	s.stop()
	r.wait("the outage", d, func(s Destination) bool { return !s.Sending && s.Error != "" })
	r.logs.Logger("etcd").Info("two")
	s.start()
	c.wait("etcd", "one", "two")
	r.wait("the end of the outage", d, func(s Destination) bool { return s.Sending && s.Dropped == 0 })

	octets := newServer(t, c.readOctets)
	r.configure(target(t, "tcp://"+octets.address, config.LogRFC5424))
	r.wait("the new destination", target(t, "tcp://"+octets.address, config.LogRFC5424), func(s Destination) bool { return s.Format == config.LogRFC5424 })
	if _, err := Destinations.Get(r.store, d.Name()); !errors.Is(err, resource.ErrNotFound) {
		t.Errorf("the old destination: %v", err)
	}
	r.logs.Logger("etcd").Info("three")
	c.wait("etcd", "one", "two", "three")
	s.stop()
	s.read = c.readOctets
	s.start()
	d.Format = config.LogRFC5424
	r.configure(d)
	r.logs.Logger("etcd").Info("four")
	c.wait("etcd", "one", "two", "three", "four")
	r.configure()
	eventually.That(t, 10*time.Second, "no destinations", func() error {
		if n := len(Destinations.List(r.store)); n > 0 {
			return fmt.Errorf("%d destinations", n)
		}
		return nil
	})
}

// A server that reads nothing costs a bounded number of lines, and nobody's time.
func TestBlockedServer(t *testing.T) {
	r, c := newRig(t), &collector{t: t}
	release := make(chan struct{})
	s := newServer(t, func(conn io.Reader) {
		<-release
		c.readLines(conn)
	})
	resume := sync.OnceFunc(func() { close(release) })
	t.Cleanup(resume) // before the server's end
	d := target(t, "tcp://"+s.address, config.LogJSONLines)
	r.configure(d)
	r.run()
	r.logs.Logger("etcd").Info("first")
	r.wait("the first lines", d, func(s Destination) bool { return s.Sent > 0 })
	log, began := r.logs.Logger("flood"), time.Now()
	const lines, text = 15_000, 1000 // more than the buffers of the kernel and the feed take
	for i := range lines {
		log.Info(fmt.Sprint(i, " ", strings.Repeat("x", text)))
	}
	t.Logf("%d lines in %s", lines, time.Since(began))
	r.wait("a backlog", d, func(s Destination) bool { return s.Sent > 0 })
	resume()
	r.wait("dropped lines", d, func(s Destination) bool { return s.Dropped > 0 })
	last := fmt.Sprint(lines-1, " ")
	eventually.That(t, 60*time.Second, "the last line", func() error {
		if got := c.of("flood"); len(got) == 0 || !strings.HasPrefix(got[len(got)-1], last) {
			return fmt.Errorf("%d lines have arrived", len(got))
		}
		return nil
	})
	dropped := 0
	for _, message := range c.of(LogID) {
		var n int
		if _, err := fmt.Sscanf(message, "%d lines are missing here", &n); err == nil {
			dropped += n
		}
	}
	if arrived := len(c.of("flood")); arrived+dropped < lines || dropped == 0 || uint64(dropped) != r.state(d).Dropped {
		t.Errorf("%d lines have arrived, %d were reported as dropped, the state has %+v", arrived, dropped, r.state(d))
	}
}

// The audit log is read across its rotation, without what an earlier boot has left.
func TestAuditLog(t *testing.T) {
	r := newRig(t)
	a := &auditLog{path: r.o.AuditLog, feed: r.logs.Feed()}
	reader := r.logs.Feed().Read()
	write := func(text string) {
		t.Helper()
		f, err := os.OpenFile(a.path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		must(t, err)
		_, err = f.WriteString(text)
		must(t, errors.Join(err, f.Close()))
	}
	var got []string
	poll := func() {
		a.poll(t.Context())
		records, _ := reader.Next(1 << 20)
		for _, record := range records {
			got = append(got, record.Message)
		}
	}
	write("old\n")
	poll()
	write("one\ntw")
	poll()
	write("o\nthree\n")
	must(t, os.Rename(a.path, strings.TrimSuffix(a.path, ".log")+"-2026-01-02T03-04-05.000.log"))
	poll()
	write("four\n")
	poll()
	must(t, os.WriteFile(a.path, []byte("5\n"), 0o600)) // truncated
	poll()
	if diff := cmp.Diff([]string{"one", "two", "three", "four", "5"}, got); diff != "" {
		t.Error(diff)
	}
}

// What is left is sent when the node stops.
func TestEndOfTheNode(t *testing.T) {
	r, c := newRig(t), &collector{t: t}
	s := newServer(t, c.readLines)
	r.o.flush = 10 * time.Second
	r.configure(target(t, "tcp://"+s.address, config.LogJSONLines))
	stop := background.Start(context.Background(), New(r.o).Run)
	r.logs.Logger("etcd").Info("starts")
	c.wait("etcd", "starts")
	r.logs.Logger("etcd").Info("stops")
	stop()
	c.wait("etcd", "starts", "stops")
}
