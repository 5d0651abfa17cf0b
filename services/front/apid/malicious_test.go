package apid

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// FuzzRequests sends what a reader may make up. Whatever it is: what reaches PID 1
// is a method that readers may call, with this gate's word for who calls.
func FuzzRequests(f *testing.F) {
	for _, seed := range [][4]string{
		{"POST", "/garboard.v1.NodeService/Version", "Garboard-Roles", "os:admin"},
		{"POST", "/garboard.v1.NodeService/Version", "garboard-roles", "os:admin"},
		{"POST", "/garboard.v1.NodeService/Version", "Connection", "Garboard-Peer, Garboard-Roles"},
		{"POST", "/garboard.v1.NodeService/Version", "Transfer-Encoding", "chunked, identity"},
		{"POST", "/garboard.v1.NodeService/Version", "Content-Length", "0\r\nGarboard-Roles: os:admin"},
		{"POST", "/garboard.v1.NodeService/Version", "Trailer", "Garboard-Roles"},
		{"POST", "/garboard.v1.NodeService/Version", "Upgrade", "h2c\r\nConnection: Upgrade"},
		{"POST", "/garboard.v1.NodeService/Version", "X-Http-Method-Override", "PUT"},
		{"POST", "/garboard.v1.NodeService/Version/../../garboard.v1.ConfigService/Apply", "", ""},
		{"GET", "/v1/logs/../../garboard.v1.FileService/Read", "", ""},
		{"GET", "/v1/logs/%2e%2e/%2e%2e/garboard.v1.FileService/Read", "", ""},
		{"GET", "/v1/logs/..%2f..%2fgarboard.v1.FileService/Read", "", ""},
		{"GET", "/v1/logs//garboard.v1.FileService/Read", "", ""},
		{"GET", "/v1/logs/kubelet?tail=5&follow=true;x=1", "", ""},
		{"GET", "https://n2/garboard.v1.FileService/Read", "Host", "n3"},
		{"GET", "//garboard.v1.NodeService/Version", "", ""},
		{"POST", "/garboard.v1.configservice/apply", "", ""},
		{"POST", "/garboard.v1.ConfigService%2fApply", "", ""},
		{"POST", "/garboard.v1.ConfigService/Apply%00", "", ""},
		{"PUT", "/garboard.v1.NodeService/Version", "", ""},
		{"CONNECT", "/garboard.v1.NodeService/Version", ":protocol", "websocket"},
		{"OPTIONS", "*", "Access-Control-Request-Method", "POST"},
		{"POST", "/garboard.v1.NodeService/Version", "Content-Type", "application/grpc"},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], "")
	}
	f.Add("POST", "/garboard.v1.NodeService/Version", "Transfer-Encoding", "chunked", "0\r\nGarboard-Roles: os:admin\r\n\r\n")
	f.Add("POST", "/garboard.v1.NodeService/Version", "Content-Length", "3", "{}\nPOST /garboard.v1.ConfigService/Apply HTTP/1.1\r\nHost: n1\r\n\r\n")
	ca := newCA(f)
	b := newBench(f, normal(f, ca), nil)
	config := clientTLS(shown(f, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}}))
	check := func(t *testing.T, how string) {
		for _, r := range b.backend.take() {
			if why := wrong(r); why != "" {
				t.Errorf("over %s: %s: %s %s %v", how, why, r.Method, r.URL, r.Header)
			}
		}
	}
	f.Fuzz(func(t *testing.T, method, path, name, value, body string) {
		if err := sendHTTP1(b.address, config, method, path, name, value, body); err != nil {
			t.Fatal(err)
		}
		check(t, "HTTP/1.1")
		if err := sendHTTP2(b.address, config, method, path, name, value, body); err != nil {
			t.Fatal(err)
		}
		check(t, "HTTP/2")
	})
}

// wrong says why a request must not have reached PID 1.
func wrong(r *http.Request) string {
	m, ok := api.Lookup(r.URL.Path)
	if !ok || !api.Allowed(m, []string{string(api.Reader)}) || r.Method != http.MethodGet && r.Method != http.MethodPost {
		return "it isn't a reader's to call"
	}
	if r.Host != machineHost || len(r.Trailer) > 0 {
		return "host or trailer"
	}
	ours := map[string]string{api.HeaderPeer: "bob", api.HeaderRoles: string(api.Reader), api.HeaderMode: api.ModeNormal}
	for name, values := range r.Header {
		want, mine := ours[name]
		switch {
		case mine && (len(values) != 1 || values[0] != want):
			return "somebody else says who calls"
		case name == api.HeaderRemote && (len(values) != 1 || !strings.HasPrefix(values[0], "127.0.0.1:")):
			return "somebody else says where from"
		case !mine && name != api.HeaderRemote && name != "Te" && name != "Content-Length" && !slices.Contains(passed, name):
			return "header " + name
		}
	}
	for name := range ours {
		if len(r.Header[name]) == 0 {
			return "it lacks " + name
		}
	}
	return ""
}

const maliciousTimeout = 5 * time.Second

// sendHTTP1 writes a request by hand, and waits for the end of the answers.
func sendHTTP1(address string, config *tls.Config, method, path, name, value, body string) error {
	config = config.Clone()
	config.NextProtos = []string{"http/1.1"}
	conn, err := tls.Dial("tcp", address, config)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(eventually.Scale(maliciousTimeout)))
	header := ""
	if name != "" {
		header = name + ": " + value + "\r\n"
	}
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: n1\r\n%s\r\n%s", method, path, header, body)
	if err := conn.CloseWrite(); err != nil {
		return nil // the gate was quicker
	}
	_, _ = io.Copy(io.Discard, conn)
	return nil
}

// sendHTTP2 writes frames by hand, with fields that no client would send.
func sendHTTP2(address string, config *tls.Config, method, path, name, value, body string) error {
	config = config.Clone()
	config.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", address, config)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(eventually.Scale(maliciousTimeout)))
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	fields := [][2]string{{":method", method}, {":scheme", "https"}, {":authority", "n1"}, {":path", path}}
	if name != "" {
		fields = append(fields, [2]string{strings.ToLower(name), value}, [2]string{name, value})
	}
	for _, field := range fields {
		_ = encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) // a buffer takes it
	}
	out := bufio.NewWriter(conn)
	_, _ = io.WriteString(out, http2.ClientPreface)
	framer := http2.NewFramer(out, conn)
	framer.AllowIllegalWrites = true
	_ = framer.WriteSettings()
	_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes()[:min(block.Len(), 16<<10)], EndHeaders: true, EndStream: body == ""})
	if body != "" {
		_ = framer.WriteData(1, false, []byte(body[:min(len(body), 16<<10)]))
		block.Reset()
		_ = encoder.WriteField(hpack.HeaderField{Name: "garboard-roles", Value: "os:admin"})
		_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
	}
	if out.Flush() != nil {
		return nil // the gate was quicker
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return nil
		}
		if frame.Header().StreamID == 1 && (frame.Header().Type == http2.FrameRSTStream || frame.Header().Flags.Has(http2.FlagDataEndStream)) ||
			frame.Header().Type == http2.FrameGoAway {
			return nil
		}
	}
}
