package main

import (
	"encoding/base64"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
)

// takenOver is a worker in the hands of somebody else, who answers in the place of another
// node. It counts what comes, and keeps what it can read.
type takenOver struct {
	garboardv1connect.UnimplementedConfigServiceHandler
	document string
	calls    atomic.Int32
	heard    strings.Builder
}

func (w *takenOver) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	w.calls.Add(1)
	body, _ := io.ReadAll(r.Body)
	w.heard.Write(body)
	if strings.HasSuffix(r.URL.Path, "/Get") {
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		_, handler := garboardv1connect.NewConfigServiceHandler(configOf(w.document))
		handler.ServeHTTP(to, r)
		return
	}
	_ = connect.NewErrorWriter().Write(to, r, connect.NewError(connect.CodeInternal, io.EOF))
}

// configOf is a node with a configuration.
func configOf(document string) *configService {
	n := newNode("10.5.0.2", "controlplane")
	n.config.text = document
	return n.config
}

// A worker that answers for a control plane, with a certificate of the cluster, gets no
// request that is for control planes, and no key. Commands for all nodes go on.
func TestWorkerInThePlaceOfAControlPlane(t *testing.T) {
	t.Parallel()
	cfg, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443"})
	if err != nil {
		t.Fatal(err)
	}
	text, err := cfg.Encode()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	control, worker := filepath.Join(dir, "controlplane.yaml"), filepath.Join(dir, "worker.yaml")
	key := base64.StdEncoding.EncodeToString(cfg.Cluster.CA.Key)
	for path, text := range map[string]string{
		control:                             string(text),
		worker:                              "version: v1alpha1\nmachine: {type: worker}\ncluster: {secret: " + string(cfg.Cluster.Secret) + "}\n",
		filepath.Join(dir, "key.yaml"):      "cluster: {ca: {key: " + key + "}}\n",
		filepath.Join(dir, "accepted.yaml"): "machine: {acceptedCAs: [{crt: x, key: " + key + "}]}\n",
		filepath.Join(dir, "broken.yaml"):   "cluster: {ca: {key: " + key + "}\n",
		filepath.Join(dir, "hostname.yaml"): "machine: {network: {hostname: n1}}\n",
		filepath.Join(dir, "registry.yaml"): "machine: {registries: {config: {r.example: {tls: {clientIdentity: {key: " + key + "}}}}}}\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		args  string
		calls int32 // that come to the worker
		want  string
	}{
		{"bootstrap", 0, "'gbctl bootstrap' is for control planes; name one with -n. If 10.5.0.2 is one, another machine answers in its place"},
		{"etcd members", 0, "'gbctl etcd members' is for control planes"},
		{"etcd snapshot " + dir + "/etcd.db", 0, "'gbctl etcd snapshot' is for control planes"},
		{"kubeconfig -", 0, "'gbctl kubeconfig' is for control planes"},
		{"config renew", 0, "'gbctl config renew' is for control planes"},
		{"rotate-ca --dry-run", 0, "'gbctl rotate-ca' is for control planes"},
		{"upgrade-k8s --to 1.37.2", 0, "'gbctl upgrade-k8s' is for control planes"},
		{"convert-k8s", 0, "'gbctl convert-k8s' is for control planes"},
		{"apply-config -f " + control, 0, "the configuration has "},
		{"apply-config -f " + control, 0, "use 'gbctl -n 10.5.0.2 reset', and then 'gbctl -n 10.5.0.2 apply-config --insecure -f FILE'"},
		{"apply-config -f " + dir + "/broken.yaml", 0, "what can't be read (yaml: "},
		{"patch mc -p @" + dir + "/key.yaml", 1, "the configuration has cluster.ca.key, and keys of the cluster are for control planes only"},
		{"patch mc -p @" + dir + "/accepted.yaml", 1, "the configuration has machine.acceptedCAs[0].key"},
		// What is for all nodes comes to it.
		{"apply-config -f " + worker, 1, "EOF"},
		{"patch mc -p @" + dir + "/hostname.yaml", 2, "EOF"},
		{"patch mc -p @" + dir + "/registry.yaml", 2, "EOF"},
		{"version", 1, "EOF"},
	} {
		node := &takenOver{document: "version: v1alpha1\nmachine: {type: controlplane}\ncluster: {secret: c2VjcmV0}\n"}
		a := liveNodes(t, map[string]http.Handler{"10.5.0.2": node})
		contexts := &client.Config{Context: "home", Contexts: map[string]*client.Context{"home": a.loaded}}
		if err := contexts.Save(filepath.Join(dir, "config")); err != nil {
			t.Fatal(err)
		}
		root := a.rootCommand()
		root.SetArgs(append(strings.Fields(tc.args), "-n", "10.5.0.2", "--garboardconfig", filepath.Join(dir, "config")))
		err := root.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("gbctl %s: %v, want %q", tc.args, err, tc.want)
		}
		if n := node.calls.Load(); n != tc.calls {
			t.Errorf("gbctl %s: %d calls came, want %d", tc.args, n, tc.calls)
		}
		if tc.calls == 0 && (!strings.Contains(err.Error(), "its certificate is that of a worker, and nothing was sent") || exitCode(err) != codeRefused) {
			t.Errorf("gbctl %s: exit code %d, %v", tc.args, exitCode(err), err)
		}
		if strings.Contains(node.heard.String(), key) != strings.Contains(tc.args, "registry.yaml") {
			t.Errorf("gbctl %s: the authority's key came: %t", tc.args, strings.Contains(node.heard.String(), key))
		}
	}
}

// A key that the node itself has sent isn't given to it.
func TestGivenKey(t *testing.T) {
	t.Parallel()
	key := func(s string) string {
		return base64.StdEncoding.EncodeToString([]byte("-----BEGIN PRIVATE KEY-----\n" + s + "\n-----END PRIVATE KEY-----\n"))
	}
	own := "cluster: {secret: abc, ca: {key: " + key("a") + "}}\n"
	for _, tc := range []struct{ what, text, base, want string }{
		{"nothing", "", "", ""},
		{"a worker's file", "machine: {type: worker, token: abc}\ncluster: {ca: {crt: " + key("x")[:8] + "}}\n", "", ""},
		{"a worker's file of an earlier release", "machine: {type: worker}\ncluster: {secret: abc}\n", "", ""},
		{"a control plane's file", "machine: {type: controlplane}\ncluster: {secret: abc}\n", "", "cluster.secret"},
		{"a worker's file with a key", "machine: {type: worker, ca: {key: " + key("a") + "}}\n", "", "machine.ca.key"},
		{"a wrapped key", "cluster:\n  etcd:\n    ca:\n      key: |\n        " + key("a")[:20] + "\n        " + key("a")[20:] + "\n", "", "cluster.etcd.ca.key"},
		{"behind an alias", "machine: {env: {a: &a {key: " + key("a") + "}}}\ncluster: {ca: *a}\n", "", "cluster.ca.key"},
		{"merged", "machine: {env: {a: &a {key: " + key("a") + "}}}\ncluster: {ca: {<<: *a}}\n", "", "cluster.ca.key"},
		{"among what no configuration has", "cluster: {1: x, ca: {2: y, key: " + key("a") + "}}\n", "", "cluster.ca.key"},
		{"what it has", own, own, ""},
		{"another one", strings.Replace(own, key("a"), key("b"), 1), own, "cluster.ca.key"},
		{"another secret, although it says that it is a worker", "machine: {type: worker}\ncluster: {secret: abd}\n", own, "cluster.secret"},
	} {
		var base *apiv1.GetConfigResponse
		if tc.base != "" {
			base = &apiv1.GetConfigResponse{Document: []byte(tc.base)}
		}
		if got := givenKey([]byte(tc.text), base); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.what, got, tc.want)
		}
	}
}
