package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// secrets are made anew for each run, so that no scanner of repositories takes
// these for real ones.
type secrets struct {
	rsa, curve         string // PEM
	token, jwt, bearer string
}

func newSecrets(t *testing.T) secrets {
	t.Helper()
	long, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	_, short, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(short)
	if err != nil {
		t.Fatal(err)
	}
	url := base64.RawURLEncoding.EncodeToString
	return secrets{
		rsa:    string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(long)})),
		curve:  string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
		token:  "abc4ef.0123456789abcdef",
		jwt:    url([]byte(`{"alg":"RS256"}`)) + "." + url([]byte(`{"sub":"admin"}`)) + "." + url([]byte("signature of some length")),
		bearer: "c2VjcmV0IG9mIHNvbWVib2R5",
	}
}

func b64(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

// prefixed is a text as a log has it: something before each line.
func prefixed(prefix, text string) string {
	return prefix + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+prefix) + "\n"
}

// wrapAt breaks a text into lines.
func wrapAt(width int, indent, text string) string {
	var b strings.Builder
	for len(text) > width {
		b.WriteString(indent + text[:width] + "\n")
		text = text[width:]
	}
	return b.String() + indent + text + "\n"
}

func quoted(text string) string {
	b, _ := json.Marshal(text)
	return string(b)
}

func TestScrub(t *testing.T) {
	s := newSecrets(t)
	lines := strings.SplitAfter(s.rsa, "\n")
	half := len(lines) / 2
	kubeconfig := "users:\n- name: admin\n  user:\n    client-key-data: " + b64(s.curve) + "\n    username: admin\n"
	for name, c := range map[string]struct{ in, want, kind string }{
		"key":                   {"a\n" + s.rsa + "b\n", "a\n(secret)\nb\n", secretKey},
		"two keys":              {s.rsa + "between\n" + s.curve, "(secret)\nbetween\n(secret)\n", secretKey},
		"key, indented":         {"key: |\n" + prefixed("    ", s.curve) + "next: 1\n", "key: |\n    (secret)\nnext: 1\n", secretKey},
		"key in a log":          {prefixed("12:00 etcd: ", s.rsa) + "12:01 x\n", "12:00 etcd: (secret)\n12:01 x\n", secretKey},
		"key in JSON":           {`{"key":` + quoted(s.rsa) + `,"a":1}`, `{"key":"(secret)\n","a":1}`, secretKey},
		"key with CR":           {"a\r\n" + strings.ReplaceAll(s.rsa, "\n", "\r\n") + "b\r\n", "a\r\n(secret)\r\nb\r\n", secretKey},
		"key without an end":    {"a\n" + strings.Join(lines[:half], "") + "12:01 b\n", "a\n(secret)\n12:01 b\n", secretKey},
		"the same in a log":     {prefixed("1 x: ", strings.Join(lines[:half], "")) + "12:01 b\n", "1 x: (secret)\n12:01 b\n", secretKey},
		"key without beginning": {"12:01 b\n" + strings.Join(lines[half:], "") + "c\n", "12:01 b\n(secret)\nc\n", secretKey},
		"the same with a log":   {prefixed("1 x: ", strings.Join(lines[half:], "")) + "c\n", "1 x: (secret)\nc\n", secretKey},
		"base64 of a key":       {"key: " + b64(s.rsa) + "\nnext: 1\n", "key: (secret)\nnext: 1\n", secretEncoded},
		"base64, wrapped":       {"key:\n" + wrapAt(76, "    ", b64(s.rsa)) + "next: 1\n", "key:\n    (secret)\nnext: 1\n", secretEncoded},
		"base64, line follows":  {wrapAt(64, "", b64(s.rsa)) + "next\n", "(secret)\nnext\n", secretEncoded},
		// without padding
		"base64, word follows": {b64("-----BEGIN PRIVATE KEY-----\n"+strings.Repeat("x", 1502)) + "\nafter\n", "(secret)\nafter\n", secretEncoded},
		"base64 in JSON":       {`{"a":` + quoted(wrapAt(64, "", b64(s.rsa))) + `}`, `{"a":"(secret)\n"}`, secretEncoded},
		"base64 behind a name": {"x-y/" + b64(s.curve) + "\n", "(secret)\n", secretEncoded},
		"base64 of base64":     {"data: " + b64(kubeconfig) + "\n", "data: (secret)\n", secretEncoded},
		"base64 of that":       {"data: " + b64("data: "+b64(kubeconfig)) + "\n", "data: (secret)\n", secretEncoded},
		"base64 of a token":    {"data: " + b64("a file that has the token "+s.token+" in it") + "\n", "data: (secret)\n", secretEncoded},
		"kubeconfig":           {kubeconfig, strings.ReplaceAll(kubeconfig, b64(s.curve), hidden), secretEncoded},
		"client-key-data":      {`{"client-key-data":"bm90IFBFTQ=="}`, `{"client-key-data":"(secret)"}`, secretEncoded},
		"bootstrap token":      {"kubeadm join --discovery " + s.token + ".\n", "kubeadm join --discovery (secret).\n", secretBootstrap},
		"token of letters":     {"the token abcdef.ghijklmnopqrstuv\n", "the token (secret)\n", secretBootstrap},
		"bearer":               {"Authorization: Bearer " + s.bearer + "\n", "Authorization: Bearer (secret)\n", secretBearer},
		"JWT":                  {"got " + s.jwt + ", expired\n", "got (secret), expired\n", secretBearer},
		"token field":          {`msg="{\"token\":\"` + s.bearer + `\"}"`, `msg="{\"token\":\"(secret)\"}"`, secretBearer},
		"password in a URL":    {"proxy http://bob:hunter2@proxy:3128 and https://a:b@c@d/e\n", "proxy http://bob:(secret)@proxy:3128 and https://a:(secret)@d/e\n", secretPassword},
		"basic authorization":  {"authorization: Basic Ym9iOmh1bnRlcjI=\n", "authorization: Basic (secret)\n", secretPassword},
		"password field":       {"registry:\n  password: hunter2\n", "registry:\n  password: (secret)\n", secretPassword},
	} {
		got, found := scrub([]byte(c.in))
		if string(got) != c.want || found[c.kind] == 0 {
			t.Errorf("%s: got %v\n%s\nwant %s\n%s", name, found, got, c.kind, c.want)
		}
		if again, found := scrub(got); string(again) != string(got) || len(found) > 0 {
			t.Errorf("%s: a second time changes it: %v\n%s", name, found, again)
		}
	}
}

// What isn't a secret goes into the bundle to the byte.
func TestScrubKeepsTheRest(t *testing.T) {
	s := newSecrets(t)
	block, _ := pem.Decode([]byte(s.curve))
	certificate := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: bytes.Repeat(block.Bytes, 9)}))
	texts := []string{
		"", "\n", "-----BEGIN", "expects -----BEGIN PRIVATE KEY----- at the start\nand something after it\n",
		"lacks -----END RSA PRIVATE KEY-----\n", "(secret)\n", "token: (secret)\npassword: (secret)\nhttp://a:(secret)@b\n",
		certificate, "crt: " + b64(certificate) + "\n", wrapAt(76, "  ", b64(certificate)), `{"ca":` + quoted(certificate) + "}",
		"sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
		"/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/23/fs\n",
		"[   12.345678] x86: 123456.1234567890123456 s\n", "server.configurations01.example.org\n",
		"kube-apiserver-cp-1abcd.17f3a2b4c5d6e7f8\n", "system.containermanager\n", "http://10.5.0.2:2379/health?a@b\n",
		"the bearer of this message\n", "authorization: Node,RBAC\n", "token: expired\n", "tokens: 123456789012\n",
		"password: wrong\n", "uid 6e1f6a1c-0c1e-4b52-9b1c-0a7d9a4f5f10\n", "eyJ is how they begin\n",
	}
	for _, name := range []string{"support_secrets.go", "main.go", "testdata/get.txtar", "../../docs/design.md"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	for _, text := range texts {
		in := []byte(text)
		if got, found := scrub(in); string(got) != text || len(found) > 0 {
			t.Errorf("%v: %s", found, cmp.Diff(text, string(got)))
		}
		if string(in) != text {
			t.Errorf("scrub has changed what it was given: %.60q", text)
		}
	}
}

// Whatever is around it, no line of a key gets through.
func TestScrubAnywhere(t *testing.T) {
	s := newSecrets(t)
	secrets := []string{s.rsa, s.curve, b64(s.rsa), wrapAt(76, "", b64(s.curve)), prefixed("x: ", s.rsa), "Bearer " + s.bearer, " " + s.token + " "}
	tells := append(strings.Fields(s.rsa)[4:], strings.Fields(s.curve)[3:]...)
	tells = append(tells, s.bearer, s.token, b64(s.rsa)[60:120], b64(s.curve)[60:120])
	rapid.Check(t, func(t *rapid.T) {
		var b strings.Builder
		for range rapid.IntRange(1, 5).Draw(t, "parts") {
			b.WriteString(rapid.StringMatching(`[ -~\n]{0,40}`).Draw(t, "before"))
			fmt.Fprintf(&b, "\n%s\n", rapid.SampledFrom(secrets).Draw(t, "secret"))
		}
		got, found := scrub([]byte(b.String()))
		for _, tell := range tells {
			if len(tell) > 20 && !strings.HasPrefix(tell, "KEY") && strings.Contains(string(got), tell) {
				t.Fatalf("%q is still there (%v):\n%s", tell, found, got)
			}
		}
	})
}

func FuzzScrub(f *testing.F) {
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte(`{"a":"LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0t\nLS0t","token":"abc4ef.0123456789abcdef"}`))
	f.Add([]byte("http://a:b@c Bearer 0123456789"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, found := scrub(text)
		if len(found) == 0 && !bytes.Equal(got, text) {
			t.Errorf("nothing was found, and yet it was changed: %q, %q", text, got)
		}
	})
}

func BenchmarkScrub(b *testing.B) {
	line := "2026-11-21T15:24:13.123Z I1121 kubelet[812]: pod_workers.go:1324 \"Error syncing pod\" podUID=\"6e1f6a1c-0c1e-4b52-9b1c-0a7d9a4f5f10\" https://10.5.0.2:6443 token\n"
	text := bytes.Repeat([]byte(line), 5000)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		scrub(text)
	}
}
