package main

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"golang.org/x/sys/unix"

	"crypto/x509/pkix"
	"encoding/base64"
	"time"
)

// development makes the files of a development cluster, as create leaves them.
func development(t *testing.T, name, server string) *qemu.Cluster {
	t.Helper()
	home, err := qemu.Home()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(home, name)
	ca, err := pki.NewCA(pki.ECDSA, pkix.Name{CommonName: name}, time.Now(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, _, err := config.AdminKubeconfig(name, server, ca, ca.Cert, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	own := client.Config{Context: name, Contexts: map[string]*client.Context{name: {
		Endpoints: []string{"10.5.0.2"}, CA: base64.StdEncoding.EncodeToString(ca.Cert), Via: map[string]string{"10.5.0.2": "127.0.0.1:20001"},
	}}}
	garboardconfig, err := own.Encode()
	if err != nil {
		t.Fatal(err)
	}
	plan, err := json.Marshal(map[string]any{"name": name, "network": "10.5.0.0/24", "provisioner": "container", "nodes": []any{
		map[string]any{"name": name + "-controlplane-1", "type": "init", "address": "10.5.0.2", "apiPort": 20001},
		map[string]any{"name": name + "-worker-1", "type": "worker", "address": "10.5.0.3", "apiPort": 20002},
	}})
	if err != nil {
		t.Fatal(err)
	}
	err = os.MkdirAll(dir, 0o700)
	for file, data := range map[string][]byte{"plan.json": plan, "kubeconfig": kubeconfig, "garboardconfig": garboardconfig} {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, file), data, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := qemu.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// A cluster's access comes into the user's files and goes again; what else is there
// stays, and what an earlier cluster of the name left doesn't make a second one.
func TestClusterAccess(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("GARBOARD_HOME", dir)
	kubeconfig, garboardconfig := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "garboardconfig")
	t.Setenv("KUBECONFIG", kubeconfig)
	t.Setenv("GARBOARDCONFIG", garboardconfig)
	a := &app{out: io.Discard, err: io.Discard}
	put := func(c *qemu.Cluster) {
		t.Helper()
		if err := a.mergeAccess(c); err != nil {
			t.Fatal(err)
		}
	}
	contexts := func(want string, names ...string) {
		t.Helper()
		c, err := client.Load(garboardconfig)
		if err != nil {
			t.Fatal(err)
		}
		k, err := parseKube([]byte(read(t, kubeconfig)))
		if err != nil {
			t.Fatal(err)
		}
		kube := want
		if want != "" {
			kube = "admin@" + want
		}
		if c.Context != want || text(k.root, "current-context") != kube {
			t.Errorf("contexts are %q and %q, want %q", c.Context, text(k.root, "current-context"), want)
		}
		for _, list := range []string{"clusters", "users", "contexts"} {
			if got := len(get(k.root, list).Content); got != len(names) || len(c.Contexts) != len(names) {
				t.Errorf("%d contexts and %d %s, want %q", len(c.Contexts), got, list, names)
			}
		}
		for _, name := range names {
			if c.Contexts[name] == nil || k.entry("clusters", name) == nil || k.entry("users", "admin@"+name) == nil {
				t.Errorf("%s isn't there", name)
			}
		}
	}
	home := development(t, "home", "https://home.example.org:6443")
	put(home)
	put(development(t, "dev", "https://127.0.0.1:20000"))
	contexts("dev", "dev", "home")
	first := accessOf("dev")

	// Removed by other means, and made again.
	dev := development(t, "dev", "https://127.0.0.1:20000")
	put(dev)
	contexts("dev", "dev", "home")
	if err := a.removeAccess(first); err != nil {
		t.Fatal(err)
	}
	contexts("dev", "dev", "home")

	if err := a.removeAccess(accessOf("dev")); err != nil {
		t.Fatal(err)
	}
	contexts("", "home")
	put(home)
	contexts("home", "home")
	if err := a.removeAccess(accessOf("home")); err != nil {
		t.Fatal(err)
	}
	contexts("")
	if err := a.removeAccess(accessOf("nosuch")); err != nil {
		t.Errorf("access of no cluster: %v", err)
	}
}

// S-332: the names of nodes, and a cluster that is off.
func TestClusterShow(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := development(t, "dev", "https://127.0.0.1:20000")
	var out strings.Builder
	a := &app{out: &out, err: io.Discard}
	if err := a.clusterShow(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dev       dev-controlplane-1   init     10.5.0.2   cluster is off", "dev       dev-worker-1         worker   10.5.0.3   cluster is off"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q isn't in\n%s", want, out.String())
		}
	}
	for _, name := range []string{"worker-1", "dev-worker-1"} {
		if got, err := c.Find(name); err != nil || got.Name != "dev-worker-1" {
			t.Errorf("%s: %q, %v", name, got.Name, err)
		}
	}
	if _, err := c.Find("worker-2"); err == nil || !strings.Contains(err.Error(), "there are dev-controlplane-1, dev-worker-1") {
		t.Errorf("no such node: %v", err)
	}
	if err := a.clusterShow(t.Context(), "nosuch"); err == nil || !strings.Contains(err.Error(), "there is no cluster nosuch") {
		t.Errorf("no such cluster: %v", err)
	}
	if err := a.clusterShow(t.Context(), "dve"); err == nil || err.Error() != "there is no cluster dve; did you mean --name dev?" {
		t.Errorf("a cluster with another name: %v", err)
	}
}

// A cluster that another command starts or stops at the moment doesn't hide the others.
func TestClusterShowWhileOneStarts(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := development(t, "dev", "https://127.0.0.1:20000")
	development(t, "other", "https://127.0.0.1:20001")
	held(t, c)
	var out strings.Builder
	a := &app{out: &out, err: io.Discard}
	if err := a.clusterShow(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"10.5.0.2   unknown: the host process doesn't answer: it starts, stops or hangs", "other-worker-1         worker   10.5.0.3   cluster is off"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q isn't in\n%s", want, out.String())
		}
	}
	control(t, c, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode([]qemu.NodeStatus{{Name: "dev-worker-1", State: "failed", Error: "no room"}})
	})
	out.Reset()
	if err := a.clusterShow(t.Context(), "dev"); err != nil || !strings.Contains(out.String(), "failed: no room") {
		t.Errorf("a node that failed: %v\n%s", err, out.String())
	}
}

// held makes it seem that the cluster has a host process.
func held(t *testing.T, c *qemu.Cluster) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(c.Dir(), "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	// As another process' lock, which nobody else can take.
	if err := unix.FcntlFlock(lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
}

// control answers as the cluster's host process until the test has ended.
func control(t *testing.T, c *qemu.Cluster, answer http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(c.Dir(), "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: answer}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
}

// Each verb says what it did; what can't be is found before the cluster is asked.
func TestClusterDebugSays(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := development(t, "dev", "https://127.0.0.1:20000")
	off := development(t, "off", "https://127.0.0.1:20001")
	if _, err := openRunning(off.Name); err == nil || err.Error() != "cluster off is off; 'gbctl cluster create --name off' starts it" {
		t.Errorf("a cluster that is off: %v", err)
	}
	held(t, c)
	var asked []string
	control(t, c, func(_ http.ResponseWriter, r *http.Request) {
		path := r.URL.Path
		if offset := r.FormValue("offset"); offset != "" {
			path += "?offset=" + offset
		}
		asked = append(asked, path)
	})
	for _, tc := range []struct{ args, path, said string }{
		{"on worker-1", "/nodes/dev-worker-1/on", "dev-worker-1 is on\n"},
		{"off worker-1", "/nodes/dev-worker-1/off", "dev-worker-1 is off\n"},
		{"cut dev-worker-1", "/nodes/dev-worker-1/cut", "dev-worker-1 has no power\n"},
		{"freeze worker-1", "/nodes/dev-worker-1/freeze", "dev-worker-1 is frozen\n"},
		{"thaw worker-1", "/nodes/dev-worker-1/thaw", "dev-worker-1 runs again\n"},
		{"endpoint off", "/endpoint/off", "endpoint of dev: off for its nodes\n"},
		{"network worker-1 --loss 100", "/nodes/dev-worker-1/network", "network of dev-worker-1: loss 100%\n"},
		{"network worker-1 --loss 100.5", "", "--loss 100.5: must be a percentage from 0 to 100"},
		{"network worker-1 --loss -1", "", "--loss -1: must be a percentage from 0 to 100"},
		{"clock worker-1 --offset -8760h", "/nodes/dev-worker-1/clock?offset=-8760h0m0s", "clock of dev-worker-1: -8760h0m0s off, from its next start\n"},
		{"clock dev-worker-1", "/nodes/dev-worker-1/clock?offset=0s", "clock of dev-worker-1: 0s off, from its next start\n"},
		{"clock worker-1 --offset year", "", `invalid argument "year" for "--offset" flag`},
		{"clock worker-2 --offset 1h", "", `has no node "worker-2"; there are dev-controlplane-1, dev-worker-1`},
		{"freeze worker-2", "", `has no node "worker-2"; there are dev-controlplane-1, dev-worker-1`},
	} {
		asked = nil
		var out strings.Builder
		a := &app{out: &out, err: io.Discard}
		root := a.rootCommand()
		root.SetArgs(append(strings.Fields("cluster debug "+tc.args), "--name", "dev"))
		if err := root.ExecuteContext(t.Context()); err != nil {
			out.WriteString(err.Error())
		}
		if said, path := out.String(), strings.Join(asked, " "); path != tc.path || !strings.Contains(said, tc.said) {
			t.Errorf("%s: asked %q and said %q; want %q and %q", tc.args, path, said, tc.path, tc.said)
		}
	}
}
