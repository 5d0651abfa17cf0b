package config

import (
	"encoding/base64"
	"strings"
	"testing"
)

func TestRedact(t *testing.T) {
	text, err := Redact([]byte(full(t)))
	if err != nil {
		t.Fatal(err)
	}
	s := testSecrets()
	for i, secret := range []string{
		string(s.MachineToken), string(s.BootstrapToken), string(s.ClusterSecret), encodePEM(s.MachineCA.Key), encodePEM(s.KubernetesCA.Key), encodePEM(s.ServiceAccount),
		"supersecret", "yAnz5TF+lXXJte14tji3zlMNq", "bWU6c2VjcmV0", "identityToken: abc", "passphrase: other",
	} {
		if strings.Contains(string(text), secret) {
			t.Errorf("secret %d is still there", i)
		}
	}
	doc, err := Redact([]byte(document(t, Worker)))
	if err != nil || !strings.Contains(string(doc), "It holds secrets: keep it as you keep a private key.\n") {
		t.Errorf("%.200s, %v", doc, err)
	}
	for _, open := range []string{encodePEM(s.KubernetesCA.Crt), "http_proxy: http://proxy:3128", "publicKey: xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=", "username: me", "hostname: one"} {
		if !strings.Contains(string(text), open) {
			t.Errorf("%.60s is gone", open)
		}
	}
}

func TestRedactKeepsTheText(t *testing.T) {
	got, err := Redact([]byte(`# the node of the kitchen
version: v1alpha1 # first

machine:
    type: worker
    token: abcdef.0123456789abcdef # from the safe
    # token: abcdef.0123456789abcdef
    ca: {crt: "QUFB", key: QUFB}
    files:
    - path: /etc/motd
      public: true
      content: |
        hello
    - path: /etc/proxy
      public: true
      content: see http://me:hunter2@intranet/?password=hunter2
    - path: /etc/key
      permissions: 0644
      content: |
        hunter2
    - path: /etc/typo
      public: yes
      content: hunter2
    - path: /etc/pem
      content: "-----BEGIN EC PRIVATE KEY-----\nhunter2\n"
    env:
        https_proxy: "http://me:hunter2@proxy:3128"
        TOKEN: hunter2
        DBPASS: hunter2
        HOST: hunter2
        NO_PROXY: 10.0.0.0/8
    registries:
        mirrors:
            '*': {endpoints: ['http://me:hunter2@mirror:5000']}
    typo:
        password: hunter2
        name: seen
cluster:
    token: &t abcdef.0123456789abcdef
    secret: *t
    inlineManifests:
    - name: a
      contents: "kind: Secret\ndata: {x: hunter2}\n"
`))
	if err != nil {
		t.Fatal(err)
	}
	want(t, `# the node of the kitchen
version: v1alpha1 # first

machine:
    type: worker
    token: (secret) # from the safe
    # token: (secret)
    ca: {crt: "QUFB", key: (secret)}
    files:
    - path: /etc/motd
      public: true
      content: |
        hello
    - path: /etc/proxy
      public: true
      content: see http://me:xxxxx@intranet/?password=xxxxx
    - path: /etc/key
      permissions: 0644
      content: (secret)
    - path: /etc/typo
      public: yes
      content: (secret)
    - path: /etc/pem
      content: (secret)
    env:
        https_proxy: http://me:xxxxx@proxy:3128
        TOKEN: (secret)
        DBPASS: (secret)
        HOST: (secret)
        NO_PROXY: 10.0.0.0/8
    registries:
        mirrors:
            '*': {endpoints: ['http://me:xxxxx@mirror:5000']}
    typo:
        password: (secret)
        name: seen
cluster:
    token: &t (secret)
    secret: (secret)
    inlineManifests:
    - name: a
      contents: (secret)
`, string(got))
}

func TestRedactFollowsAliases(t *testing.T) {
	got, err := Redact([]byte("note: &a hunter2\nmachine:\n  token: *a\n"))
	if err != nil {
		t.Fatal(err)
	}
	want(t, "note: &a (secret)\nmachine:\n  token: (secret)\n", string(got))
}

func TestRedactWhatIsNoDocument(t *testing.T) {
	for _, doc := range []string{"", "a: [", "a: 1\n---\nb: 2\n"} {
		if text, err := Redact([]byte(doc)); err == nil {
			t.Errorf("%q became %q", doc, text)
		}
	}
}

// A certificate in one file with its key, and URLs with tokens.
func TestRedactLooksIntoValues(t *testing.T) {
	both := base64.StdEncoding.EncodeToString([]byte("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"))
	got, err := Redact([]byte(`machine:
    logging:
        destinations:
            - endpoint: https://intake.example/v1?dd-api-key=geheim&host=a
    registries:
        config:
            a: {tls: {clientIdentity: {crt: ` + both + `}}}
cluster:
    extraManifests: ['https://example/x.yaml?token=geheim']
`))
	if err != nil {
		t.Fatal(err)
	}
	want(t, `machine:
    logging:
        destinations:
            - endpoint: https://intake.example/v1?dd-api-key=xxxxx&host=xxxxx
    registries:
        config:
            a: {tls: {clientIdentity: {crt: (secret)}}}
cluster:
    extraManifests: ['https://example/x.yaml?token=xxxxx']
`, string(got))
}

// What is secret in a line of a log or of the kernel is hidden, and nothing else is.
func TestRedactText(t *testing.T) {
	t.Parallel()
	for text, shown := range map[string]string{
		"Command line: quiet garboard.config=http://me:hunter2@10.0.0.1/a.yaml?x=hunter2 console=ttyS0": "Command line: quiet garboard.config=http://me:xxxxx@10.0.0.1/a.yaml?xxxxx console=ttyS0",
		"garboard.config=data:;base64,aHVudGVyMg== quiet":                                               "garboard.config=data:xxxxx quiet",
		"get https://hunter2@host/x: refused":                                                           "get https://xxxxx@host/x: refused",
		"kubelet --bootstrap-token=hunter2 --v=2":                                                       "kubelet --bootstrap-token=xxxxx --v=2",
		"DBPASS=hunter2 DB_HOST=db":                                                                     "DBPASS=xxxxx DB_HOST=db",
		`msg="login" password=\"hunter2\" user=me`:                                                      `msg="login" password=\"xxxxx\" user=me`,
		"https://bucket/x?X-Amz-Date=1&X-Amz-Signature=hunter2&y=1":                                     "https://bucket/x?X-Amz-Date=1&X-Amz-Signature=xxxxx&y=1",
		"-----BEGIN EC PRIVATE KEY-----":                                                                "(secret)",
		"image pause@sha256:abc is there, took=2s":                                                      "image pause@sha256:abc is there, took=2s",
		`pod="default/a" secret="default/b" tokens=3`:                                                   `pod="default/a" secret="default/b" tokens=3`,
		"GET https://10.0.0.1:6443/api/v1/nodes?resourceVersion=1&watch=true":                           "GET https://10.0.0.1:6443/api/v1/nodes?resourceVersion=1&watch=true",
	} {
		if got := RedactText(text); got != shown {
			t.Errorf("%q is shown as %q, not %q", text, got, shown)
		}
	}
}
