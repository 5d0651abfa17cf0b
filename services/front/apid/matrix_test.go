package apid

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// everything answers all methods of the API, with nothing. (Each message of the
// API can be read as an empty one.)
func everything() http.Handler {
	type empty = emptypb.Empty
	mux := http.NewServeMux()
	for _, m := range api.Methods() {
		if m.Streaming {
			mux.Handle(m.Procedure, connect.NewServerStreamHandler(m.Procedure,
				func(_ context.Context, _ *connect.Request[empty], s *connect.ServerStream[empty]) error {
					return s.Send(new(empty))
				}))
			continue
		}
		mux.Handle(m.Procedure, connect.NewUnaryHandler(m.Procedure,
			func(context.Context, *connect.Request[empty]) (*connect.Response[empty], error) {
				return connect.NewResponse(new(empty)), nil
			}, connect.WithIdempotency(connect.IdempotencyNoSideEffects)))
	}
	mux.HandleFunc(api.LogsPath, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, `{"line":"x"}`) })
	return mux
}

// ask calls a method, whichever it is.
func ask(ctx context.Context, c connect.HTTPClient, url string, m api.Method, opts ...connect.ClientOption) error {
	client := connect.NewClient[emptypb.Empty, emptypb.Empty](c, url+m.Procedure, opts...)
	if !m.Streaming {
		_, err := client.CallUnary(ctx, connect.NewRequest(new(emptypb.Empty)))
		return err
	}
	stream, err := client.CallServerStream(ctx, connect.NewRequest(new(emptypb.Empty)))
	if err != nil {
		return err
	}
	defer stream.Close()
	got := 0
	for stream.Receive() {
		got++
	}
	if err := stream.Err(); err != nil {
		return err
	}
	if got != 1 {
		return fmt.Errorf("%d messages", got)
	}
	return nil
}

// protocols are the ways of calling that a client may take.
var protocols = []struct {
	name    string
	http2   bool
	options []connect.ClientOption
}{
	{"connect", true, nil},
	{"connect with HTTP/1.1 and JSON", false, []connect.ClientOption{connect.WithProtoJSON()}},
	{"connect with GET", true, []connect.ClientOption{connect.WithHTTPGet(), connect.WithIdempotency(connect.IdempotencyNoSideEffects)}},
	{"gRPC", true, []connect.ClientOption{connect.WithGRPC()}},
	{"gRPC-Web", false, []connect.ClientOption{connect.WithGRPCWeb()}},
}

// person is who calls: a certificate's organisations.
type person struct {
	name string
	orgs []string
}

func people() []person {
	all := []person{
		{"nobody", nil},
		{"stranger", []string{"os:root", "OS:ADMIN", "os:admin ", "system:masters"}},
		{"trickster", []string{"os:reader,os:admin"}}, // one organisation that looks like two
		{"team", []string{string(api.Reader), string(api.EtcdBackup), string(api.Peer)}},
	}
	for _, role := range api.Roles() {
		all = append(all, person{string(role), []string{string(role)}})
	}
	return all
}

// Every method, for every role, over every protocol: allowed or refused exactly as
// declared.
func TestMatrixRoles(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	allowed, refused := 0, 0
	for _, caller := range people() {
		cert := shown(t, ca, pki.Leaf{CN: caller.name, Orgs: caller.orgs})
		for _, p := range protocols {
			client := b.client(t, cert, p.http2)
			for _, m := range api.Methods() {
				err := ask(t.Context(), client, b.url(""), m, p.options...)
				seen := b.backend.take()
				if !api.Allowed(m, caller.orgs) {
					refused++
					if connect.CodeOf(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), string(m.Role)) || len(seen) > 0 {
						t.Errorf("%s, %s, %s: %v; %d requests went through", caller.name, p.name, m.Procedure, err, len(seen))
					}
					continue
				}
				allowed++
				if err != nil || len(seen) != 1 {
					t.Errorf("%s, %s, %s: %v; %d requests went through", caller.name, p.name, m.Procedure, err, len(seen))
					continue
				}
				h := seen[0].Header
				if h.Get(api.HeaderPeer) != caller.name || h.Get(api.HeaderMode) != api.ModeNormal ||
					!strings.HasPrefix(h.Get(api.HeaderRemote), "127.0.0.1:") || !sameRoles(h.Get(api.HeaderRoles), caller.orgs) {
					t.Errorf("%s, %s: headers %v", caller.name, m.Procedure, h)
				}
			}
		}
	}
	if least := len(api.Methods()) * len(protocols); allowed < least || refused < least {
		t.Errorf("%d calls allowed, %d refused", allowed, refused)
	}
}

// sameRoles: only those that there are get through.
func sameRoles(header string, orgs []string) bool {
	var want []string
	for _, role := range api.Roles() {
		if slices.Contains(orgs, string(role)) {
			want = append(want, string(role))
		}
	}
	return header == strings.Join(want, ",")
}

// Nobody may call what isn't declared, not even an administrator.
func TestMatrixUnknownProcedure(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	client := b.client(t, admin(t, ca), true)
	for _, procedure := range []string{"/garboard.v1.ConfigService/Destroy", "/garboard.v1.TrustService/Sign", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/", "/debug/pprof/"} {
		for _, p := range protocols[:4] {
			err := ask(t.Context(), client, b.url(""), api.Method{Procedure: procedure}, p.options...)
			if connect.CodeOf(err) != connect.CodePermissionDenied {
				t.Errorf("%s, %s: %v", p.name, procedure, err)
			}
		}
	}
	if seen := b.backend.take(); len(seen) > 0 {
		t.Errorf("%d requests went through", len(seen))
	}
}

// Certificates that aren't good, whatever role they name: none of the methods can
// be called.
func TestMatrixCertificates(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ca, other := newCA(t), newCA(t)
	old, err := pki.NewMachineCA(now.Add(-800 * 24 * time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	boss := pki.Leaf{CN: "alice", Orgs: []string{string(api.Admin), string(api.Peer)}} // all methods
	with := func(change func(*pki.Leaf)) pki.Leaf { l := boss; change(&l); return l }
	b := newBench(t, normal(t, ca, old), everything())
	for _, tc := range []struct {
		name string
		cert *tls.Certificate
		want string // in the error
		code connect.Code
	}{
		{"no certificate", nil, "certificate required", connect.CodeUnavailable},
		{"wrong authority", shown(t, other, boss), "bad certificate", connect.CodeUnavailable},
		{"wrong authority, right one sent along", shown(t, other, boss, ca.Cert), "bad certificate", connect.CodeUnavailable},
		{"for servers only", shown(t, ca, with(func(l *pki.Leaf) { l.Server, l.DNS = true, []string{"n2"} })), "bad certificate", connect.CodeUnavailable},
		{"expired", shown(t, old, with(func(l *pki.Leaf) { l.Now = now.Add(-700 * 24 * time.Hour) })), "expired at", connect.CodeUnauthenticated},
		{"not yet valid", shown(t, ca, with(func(l *pki.Leaf) { l.Now = now.Add(3 * 24 * time.Hour) })), "isn't valid before", connect.CodeUnauthenticated},
		{"good", shown(t, ca, boss), "", 0},
		{"good, by the other authority", shown(t, old, boss), "", 0},
	} {
		for _, p := range protocols {
			client := b.client(t, tc.cert, p.http2)
			for _, m := range api.Methods() {
				err := ask(t.Context(), client, b.url(""), m, p.options...)
				if tc.want == "" && err == nil {
					continue
				}
				if tc.want == "" || err == nil || !refusedAs(err, tc.code, tc.want) {
					t.Fatalf("%s, %s, %s: %v", tc.name, p.name, m.Procedure, err)
				}
			}
		}
		if seen := b.backend.take(); tc.want != "" && len(seen) > 0 {
			t.Errorf("%s: %d requests went through", tc.name, len(seen))
		}
	}
	if !strings.Contains(b.log.String(), "signed by unknown authority") {
		t.Errorf("the log doesn't say who was refused: %s", b.log)
	}
}

// refusedAs: an HTTP client may see the end of the connection before the alert that
// says why.
func refusedAs(err error, code connect.Code, text string) bool {
	for _, early := range []string{"connection reset", "broken pipe", "client conn could not be established", "client conn is closed", "use of closed network connection"} {
		if strings.Contains(err.Error(), early) {
			return code == connect.CodeUnavailable
		}
	}
	return connect.CodeOf(err) == code && strings.Contains(err.Error(), text) &&
		(code != connect.CodeUnauthenticated || strings.Contains(err.Error(), "the node's clock shows "))
}

// TLS 1.2 isn't spoken, with any certificate.
func TestMatrixTLS12(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	config := clientTLS(admin(t, ca))
	config.MaxVersion = tls.VersionTLS12
	conn, err := tls.Dial("tcp", b.address, config)
	if err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Errorf("%v, %v", conn, err)
	}
}

// An authority that is taken out of the bundle takes its certificates with it: on
// new connections, and on those that are open.
func TestMatrixRevoked(t *testing.T) {
	t.Parallel()
	old, next := newCA(t), newCA(t)
	b := newBench(t, normal(t, old), everything())
	method, _ := api.Lookup("/garboard.v1.NodeService/Status")
	oldOpen := b.client(t, admin(t, old), true)
	nextClient := b.client(t, admin(t, next), true)
	call := func(c *http.Client) error { return ask(t.Context(), c, b.url(""), method) }
	if err := call(oldOpen); err != nil {
		t.Fatal(err)
	}
	if err := call(nextClient); err == nil {
		t.Error("an authority was trusted before the rotation")
	}
	// Both, for as long as the rotation takes.
	b.writeAndWait(t, normal(t, next, old))
	for name, c := range map[string]*http.Client{"old": oldOpen, "new": nextClient, "old, again": b.client(t, admin(t, old), true)} {
		if err := call(c); err != nil {
			t.Errorf("during the rotation, %s: %v", name, err)
		}
	}
	b.writeAndWait(t, normal(t, next))
	if err := call(oldOpen); err == nil {
		t.Error("an open connection with a certificate of the old authority was served")
	}
	if err := call(b.client(t, admin(t, old), true)); err == nil {
		t.Error("the old authority is still trusted")
	}
	if err := call(nextClient); err != nil {
		t.Errorf("after the rotation: %v", err)
	}
}

// A call that follows something ends when its caller's authority is gone.
func TestRevokedConnectionIsClosed(t *testing.T) {
	t.Parallel()
	old, next := newCA(t), newCA(t)
	b := newBench(t, normal(t, old), everything())
	conn, err := tls.Dial("tcp", b.address, clientTLS(admin(t, old)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /v1/logs/kubelet HTTP/1.1\r\nHost: n1\r\n\r\n")
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	b.writeAndWait(t, normal(t, next))
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := conn.Read(make([]byte, 4096)); err != nil {
				ended <- err
				return
			}
		}
	}()
	select {
	case <-ended:
	case <-time.After(eventually.Scale(10 * time.Second)):
		t.Error("the connection stayed open")
	}
}

// gRPC's own client can call the API, and understands why it may not.
func TestGRPCClient(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	cert := shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}})
	conn, err := grpc.NewClient("dns:///"+b.address, grpc.WithTransportCredentials(credentials.NewTLS(clientTLS(cert))))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(20*time.Second))
	defer cancel()
	if err := conn.Invoke(ctx, "/garboard.v1.NodeService/Version", new(emptypb.Empty), new(emptypb.Empty)); err != nil {
		t.Error(err)
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/garboard.v1.LogService/Read")
	if err == nil {
		err = errors.Join(stream.SendMsg(new(emptypb.Empty)), stream.CloseSend(), stream.RecvMsg(new(emptypb.Empty)))
	}
	if err != nil {
		t.Error(err)
	}
	err = conn.Invoke(ctx, "/garboard.v1.NodeService/Reboot", new(emptypb.Empty), new(emptypb.Empty))
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "needs the role os:operator") {
		t.Error(err)
	}
}

// Every method × every role with curl, as JSON; the gate's errors are JSON too.
func TestMatrixCurl(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	for _, caller := range people() {
		c := newCurl(t, ca, shown(t, ca, pki.Leaf{CN: caller.name, Orgs: caller.orgs}))
		args := []string{"-d", "{}", "-H", "Content-Type: application/json", "-w", "%{http_code} %{url_effective}\n"}
		want := map[string]int{}
		for _, m := range api.Methods() {
			if m.Streaming {
				continue // needs envelopes, which curl can't write
			}
			args = append(args, "-o", "/dev/null", b.url(m.Procedure))
			want[m.Procedure] = http.StatusForbidden
			if api.Allowed(m, caller.orgs) {
				want[m.Procedure] = http.StatusOK
			}
		}
		out, err := c.run(args...)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got := 0
		for line := range strings.Lines(out) {
			code, url, _ := strings.Cut(strings.TrimSpace(line), " ")
			procedure := strings.TrimPrefix(url, b.url(""))
			if got++; strconv.Itoa(want[procedure]) != code {
				t.Errorf("%s, %s: %s, want %d", caller.name, procedure, code, want[procedure])
			}
		}
		if got != len(want) {
			t.Errorf("%s: %d answers to %d calls", caller.name, got, len(want))
		}
	}
}

func TestCurlByHand(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	reader := newCurl(t, ca, shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}}))
	for _, tc := range []struct {
		name string
		curl curl
		args []string
		want string
	}{
		{"POST", reader, []string{"-d", "{}", "-H", "Content-Type: application/json", b.url("/garboard.v1.NodeService/Version")}, "{}"},
		{"POST with HTTP/1.1", reader, []string{"--http1.1", "-d", "{}", "-H", "Content-Type: application/json", b.url("/garboard.v1.NodeService/Version")}, "{}"},
		{"GET", reader, []string{b.url("/garboard.v1.NodeService/Version?connect=v1&encoding=json&message=%7B%7D")}, "{}"},
		{"logs", reader, []string{b.url("/v1/logs/kube-system/kube-apiserver-n1:kube-apiserver?tail=5&follow=true")}, `{"line":"x"}` + "\n"},
		{"refused", reader, []string{"-d", "{}", "-H", "Content-Type: application/json", b.url("/garboard.v1.ConfigService/Apply")},
			`{"code":"permission_denied","message":"/garboard.v1.ConfigService/Apply needs the role os:admin; client certificate \"bob\" has os:reader"}`},
		{"writing a log", reader, []string{"-d", "{}", b.url("/v1/logs/kubelet")}, `{"code":"permission_denied","message":"no role may call POST /v1/logs/kubelet"}`},
	} {
		if out, err := tc.curl.run(tc.args...); err != nil || out != tc.want {
			t.Errorf("%s: %v: %s", tc.name, err, out)
		}
	}
	if out, err := newCurl(t, ca, nil).run(b.url("/v1/logs/kubelet")); err == nil {
		t.Errorf("without a certificate: %s", out)
	}
}

// curl is the program with its files.
type curl struct {
	t    testing.TB
	args []string
}

func newCurl(t testing.TB, ca pki.CA, cert *tls.Certificate) curl {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := curl{t, []string{"--silent", "--show-error", "--cacert", write("ca.crt", ca.Cert)}}
	if cert != nil {
		var chain []byte
		for _, der := range cert.Certificate {
			chain = append(chain, pki.EncodeCert(der)...)
		}
		key, err := pki.EncodeKey(signer(cert))
		if err != nil {
			t.Fatal(err)
		}
		if block, _ := pem.Decode(key); block.Type != "PRIVATE KEY" {
			t.Fatalf("the key is a %s: not Ed25519", block.Type)
		}
		c.args = append(c.args, "--cert", write("client.crt", chain), "--key", write("client.key", key))
	}
	return c
}

func (c curl) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), eventually.Scale(30*time.Second))
	defer cancel()
	out, err := exec.CommandContext(ctx, "curl", append(c.args[:len(c.args):len(c.args)], args...)...).CombinedOutput()
	return string(out), err
}

// failing is a method that always fails.
func failing(procedure string, err error) http.Handler {
	return connect.NewUnaryHandler(procedure, func(context.Context, *connect.Request[emptypb.Empty]) (*connect.Response[emptypb.Empty], error) {
		return nil, err
	}, connect.WithIdempotency(connect.IdempotencyNoSideEffects))
}
