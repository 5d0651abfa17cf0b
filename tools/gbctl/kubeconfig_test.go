package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

// A node in the hands of somebody else must not get a program run, or a file read,
// on the machine of an administrator.
func TestKubeconfigOfAHostileNode(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	data, _, err := config.AdminKubeconfig("home", "https://10.5.0.2:6443", ca, ca.Cert, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := checkKubeconfig(data, nil); err != nil {
		t.Fatalf("a real one: %v", err)
	}
	good := string(data)
	for name, bad := range map[string]string{
		"a program":        strings.Replace(good, "user:\n        client-cert", "user:\n        exec: {apiVersion: client.authentication.k8s.io/v1, command: sh}\n        client-cert", 1),
		"an old program":   strings.Replace(good, "user:\n        client-cert", "user:\n        auth-provider: {name: gcp}\n        client-cert", 1),
		"a file":           strings.Replace(good, "user:\n        client-cert", "user:\n        tokenFile: /etc/passwd\n        client-cert", 1),
		"a proxy":          strings.Replace(good, "server:", "proxy-url: http://10.0.0.1\n        server:", 1),
		"users twice":      good + "users: [{name: x, user: {exec: {command: sh}}}]\n",
		"behind an alias":  strings.Replace(good, "apiVersion: v1", "kind: &a {exec: {command: sh}}\napiVersion: v1", 1) + "users: [{name: x, user: *a}]\n",
		"no list of users": "apiVersion: v1\nclusters: []\ncontexts: []\nusers: {}\n",
		"no mapping":       "[]",
	} {
		if bad == good {
			t.Fatalf("%s: the test changes nothing of %s", name, good)
		}
		if _, err := checkKubeconfig([]byte(bad), nil); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

// A node of an earlier release makes the first administrator's file, whoever is asked for.
func TestKubeconfigIsForWhoIsAskedFor(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	make := func(a config.Access) string {
		a, err := a.Complete()
		if err != nil {
			t.Fatal(err)
		}
		text, _, err := a.Kubeconfig("home", "https://10.5.0.2:6443", ca, ca.Cert, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, tc := range []struct {
		what string
		got  config.Access
		who  *apiv1.KubeconfigRequest
		want string
	}{
		{"the first administrator", config.Access{}, &apiv1.KubeconfigRequest{}, ""},
		{"a person", config.Access{User: "jo"}, &apiv1.KubeconfigRequest{User: "jo"}, ""},
		{"a person's groups", config.Access{User: "jo", Groups: []string{"b", "a"}}, &apiv1.KubeconfigRequest{User: "jo", Groups: []string{"a", "b"}}, ""},
		{"a short one", config.Access{Validity: time.Hour}, &apiv1.KubeconfigRequest{Ttl: durationpb.New(time.Hour)}, ""},
		{"another user", config.Access{}, &apiv1.KubeconfigRequest{User: "jo"}, "it is for admin (system:masters)"},
		{"another group", config.Access{User: "jo", Groups: []string{"system:masters"}}, &apiv1.KubeconfigRequest{User: "jo"}, "it is for jo (system:masters)"},
		{"one more group", config.Access{Groups: []string{"viewers", "system:masters"}}, &apiv1.KubeconfigRequest{Groups: []string{"viewers"}}, "it is for admin (viewers, system:masters)"},
		{"too long", config.Access{}, &apiv1.KubeconfigRequest{Ttl: durationpb.New(time.Hour)}, "doesn't know --user, --group and --ttl"},
	} {
		cert, err := checkKubeconfig([]byte(make(tc.got)), tc.who)
		if tc.want == "" && (err != nil || cert == nil) || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", tc.what, err, tc.want)
		}
	}
}

// What isn't the cluster's stays byte for byte, however it was written, when a cluster's
// access comes and goes.
func TestKubeconfigOfOthersStays(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	add, _, err := config.AdminKubeconfig("dev", "https://127.0.0.1:20000", ca, ca.Cert, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	const flush = `# mine
apiVersion: v1
clusters:
# at work
- cluster:
    server: https://work.example.org:6443
    tls-server-name: work # behind a forwarder
  name: work
# who is where
contexts:
- context:
    cluster: work
    namespace: mine
    user: me
  name: work
current-context: ""
kind: Config
preferences: {}
users:
- name: me
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      args:
      - --token
      - |-
        one

          two
      - - nested
      command: sign-in
      env: null
- name: "you"
  user: {token: abc}
`
	const indented = `apiVersion: v1
clusters:
  - name: work
    cluster:
      server: https://work.example.org:6443
contexts:
  - context: {cluster: work, user: me}
    name: work
users:
  - name: me
    user:
      tokens:
        - a
current-context: ""
`
	for name, before := range map[string]string{"as kubectl writes it": flush, "indented": indented, "nothing in it": "clusters: []\ncontexts: []\nusers: []\ncurrent-context: \"\"\n"} {
		merged, err := new(merging).merge([]byte(before), add)
		if err != nil {
			t.Fatal(err)
		}
		k, err := parseKube(merged)
		if err != nil {
			t.Fatalf("%s: %v in\n%s", name, err, merged)
		}
		if k.entry("users", "admin@dev") == nil || text(k.root, "current-context") != "admin@dev" {
			t.Errorf("%s: dev isn't in\n%s", name, merged)
		}
		mine := text(get(k.entry("clusters", "dev"), "cluster"), "certificate-authority-data")
		after, changed, err := withoutCluster(merged, mine)
		if err != nil || !changed {
			t.Fatalf("%s: %v, %v", name, changed, err)
		}
		if diff := cmp.Diff(before, string(after)); diff != "" {
			t.Errorf("%s: it isn't what it was:\n%s", name, diff)
		}
	}
}

// kubectl skips empty elements of $KUBECONFIG.
func TestKubeconfigOfTheEnvironment(t *testing.T) {
	t.Setenv("KUBECONFIG", string(filepath.ListSeparator)+"/home/u/config")
	if file, err := defaultKubeconfig(); err != nil || file != "/home/u/config" {
		t.Errorf("%q, %v", file, err)
	}
}
