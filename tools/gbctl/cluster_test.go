package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/client/faultyserver"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"github.com/rogpeppe/go-internal/testscript"
)

// The cluster of a script. Its nodes answer over TLS on loopback, where the
// context's via leads.
//
//	10.5.0.2  a control plane
//	10.5.0.3  a worker
//	10.5.0.4  is in maintenance mode
//	10.5.0.7  goes down: it closes each connection
//	10.5.0.8  belongs to another cluster
//	10.5.0.9  is off: its port is closed
const (
	nodeControlPlane = "10.5.0.2"
	nodeWorker       = "10.5.0.3"
	nodeMaintenance  = "10.5.0.4"
	nodeGoesDown     = "10.5.0.7"
	nodeStranger     = "10.5.0.8"
	nodeOff          = "10.5.0.9"
)

type cluster struct {
	env    *testscript.Env
	ca     pki.CA
	config *client.Config
	nodes  map[string]*node
}

type clusterKey struct{}

// setup makes the cluster, and the client configuration at $HOME.
func setup(env *testscript.Env) error {
	home := filepath.Join(env.WorkDir, "home")
	env.Setenv("HOME", home)
	env.Setenv("KUBECONFIG", "")
	env.Setenv("TZ", "UTC")
	crt, err := firstAdmin()
	if err != nil {
		return err
	}
	env.Setenv("CRT", crt)
	now := time.Now()
	ca, err := pki.NewMachineCA(now)
	if err != nil {
		return err
	}
	other, err := pki.NewMachineCA(now)
	if err != nil {
		return err
	}
	c := &cluster{env: env, ca: ca, nodes: map[string]*node{}, config: &client.Config{Context: "home", Contexts: map[string]*client.Context{}}}
	env.Values[clusterKey{}] = c
	via := map[string]string{}
	for _, n := range []*node{newNode(nodeControlPlane, "controlplane"), newNode(nodeWorker, "worker"), newNode(nodeMaintenance, ""), newNode(nodeStranger, "worker")} {
		authority := ca
		if n.name == nodeStranger {
			authority = other
		}
		if via[n.name], err = c.serve(n, authority); err != nil {
			return err
		}
		c.nodes[n.name] = n
	}
	off, release, err := freeport.Keep()
	if err != nil {
		return err
	}
	env.Defer(release)
	via[nodeOff] = off.String()
	env.Setenv("OFF", via[nodeOff])
	env.Setenv("CONTROLPLANE", via[nodeControlPlane])
	var stop func()
	if via[nodeGoesDown], stop, err = faultyserver.Listen(); err != nil {
		return err
	}
	env.Defer(stop)
	for name, leaf := range map[string]pki.Leaf{
		"home":    {CN: "admin", Orgs: []string{string(api.Admin)}},
		"reader":  {CN: "eve", Orgs: []string{string(api.Reader)}},
		"expired": {CN: "admin", Orgs: []string{string(api.Admin)}, Validity: time.Minute, Now: now.Add(-time.Hour)},
	} {
		if err := c.addContext(name, ca, leaf, via); err != nil {
			return err
		}
	}
	if err := c.addContext("foreign", other, pki.Leaf{CN: "admin", Orgs: []string{string(api.Admin)}}, via); err != nil {
		return err
	}
	return c.config.Save(filepath.Join(home, ".garboard", "config"))
}

func (c *cluster) addContext(name string, authority pki.CA, leaf pki.Leaf, via map[string]string) error {
	leaf.Client = true
	if leaf.Now.IsZero() {
		leaf.Now = time.Now()
	}
	crt, key, err := authority.Issue(leaf)
	if err != nil {
		return err
	}
	encode := base64.StdEncoding.EncodeToString
	c.config.Contexts[name] = &client.Context{
		Endpoints: []string{nodeControlPlane}, Via: via,
		CA: encode(c.ca.Cert), Crt: encode(crt), Key: encode(key),
	}
	return nil
}

// serve answers as the node until the script has ended.
func (c *cluster) serve(n *node, ca pki.CA) (string, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}}
	if n.name == nodeMaintenance {
		own, err := pki.NewMachineCA(time.Now()) // signed by itself, as there
		if err != nil {
			return "", err
		}
		pair, err := tls.X509KeyPair(own.Cert, own.Key)
		if err != nil {
			return "", err
		}
		config.Certificates = []tls.Certificate{pair}
		c.env.Setenv("FINGERPRINT", client.Fingerprint(pair.Leaf))
	} else {
		leaf := pki.Leaf{CN: n.name, IPs: []netip.Addr{netip.MustParseAddr(n.name)}, Server: true, Now: time.Now()}
		if n.kind == "worker" {
			leaf.Units = []string{pki.WorkerUnit}
		}
		crt, key, err := ca.Issue(leaf)
		if err != nil {
			return "", err
		}
		pair, err := tls.X509KeyPair(crt, key)
		if err != nil {
			return "", err
		}
		config.Certificates = []tls.Certificate{pair}
		config.ClientAuth = tls.RequireAndVerifyClientCert
		config.ClientCAs = x509.NewCertPool()
		config.ClientCAs.AppendCertsFromPEM(ca.Cert)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: n.handler(), TLSConfig: config, ErrorLog: log.New(discard{}, "", 0)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.ServeTLS(l, "", "")
	}()
	c.env.Defer(func() {
		close(n.gone)
		_ = server.Close()
		<-done
	})
	return l.Addr().String(), nil
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// handler serves the API as the gate does: what the certificate's roles don't
// allow never gets to the node.
func (n *node) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewConfigServiceHandler(n.config))
	mux.Handle(garboardv1connect.NewFileServiceHandler(fileService{node: n}))
	mux.Handle(garboardv1connect.NewLogServiceHandler(logService{node: n}))
	mux.Handle(garboardv1connect.NewNodeServiceHandler(nodeService{node: n}))
	mux.Handle(garboardv1connect.NewImageServiceHandler(imageService{}))
	mux.Handle(garboardv1connect.NewAccessServiceHandler(accessService{node: n}))
	mux.Handle(garboardv1connect.NewResourceServiceHandler(resourceService{node: n}))
	mux.Handle(garboardv1connect.NewEtcdServiceHandler(etcdService{node: n}))
	mux.Handle(garboardv1connect.NewOperationServiceHandler(n.operations))
	mux.Handle(garboardv1connect.NewServiceServiceHandler(serviceService{node: n}))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		method, ok := api.Lookup(r.URL.Path)
		refuse := func(code connect.Code, format string, args ...any) {
			_ = connect.NewErrorWriter().Write(w, r, connect.NewError(code, fmt.Errorf(format, args...)))
		}
		switch {
		case !ok:
			refuse(connect.CodeUnimplemented, "no such method")
		case n.name == nodeMaintenance && !method.Maintenance && !method.Locked:
			refuse(connect.CodeFailedPrecondition, "the node has no configuration yet")
		case n.name != nodeMaintenance && !api.Allowed(method, r.TLS.PeerCertificates[0].Subject.Organization):
			refuse(connect.CodePermissionDenied, "%s needs %s", method.Procedure, method.Role)
		default:
			mux.ServeHTTP(w, r)
		}
	})
}

func scriptCluster(ts *testscript.TestScript) *cluster {
	return ts.Value(clusterKey{}).(*cluster)
}

// exits runs gbctl and holds its exit code against a number: exits 6 gbctl …
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE gbctl ARGS…")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	var status interface{ ExitCode() int }
	if errors.As(err, &status) {
		got = fmt.Sprint(status.ExitCode())
	}
	if got != args[0] {
		ts.Fatalf("exit code %s, want %s (%v)", got, args[0], err)
	}
}

// change changes a node: change NODE WHAT.
func change(ts *testscript.TestScript, _ bool, args []string) {
	c := scriptCluster(ts)
	n := c.nodes[args[0]]
	if n == nil {
		ts.Fatalf("no node %s", args[0])
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mood = args[1]
}

// reader waits until somebody reads the log of a node that never ends.
func reader(ts *testscript.TestScript, _ bool, args []string) {
	select {
	case <-scriptCluster(ts).nodes[args[0]].reading:
	case <-time.After(eventually.Scale(10 * time.Second)):
		ts.Fatalf("nobody reads the log of %s", args[0])
	}
}

// links checks where a symbolic link leads: links FILE TARGET.
func links(ts *testscript.TestScript, _ bool, args []string) {
	target, err := os.Readlink(ts.MkAbs(args[0]))
	ts.Check(err)
	if target != args[1] {
		ts.Fatalf("%s leads to %s, want %s", args[0], target, args[1])
	}
}

// answers holds what gbctl says to mistyped command lines against a file: "gbctl ARGS…", and below it the exit code and
// a text that must be printed.
func answers(ts *testscript.TestScript, _ bool, args []string) {
	line, wrong, checked := "", 0, 0
	for text := range strings.Lines(ts.ReadFile(args[0])) {
		text = strings.TrimSuffix(text, "\n")
		want, ok := strings.CutPrefix(text, "\t")
		if !ok {
			line = text
			continue
		}
		checked++
		code, want, _ := strings.Cut(want, " ")
		err := ts.Exec("gbctl", words(strings.TrimPrefix(line, "gbctl "))...)
		var status interface{ ExitCode() int }
		if said := ts.ReadFile("stderr"); !errors.As(err, &status) || fmt.Sprint(status.ExitCode()) != code || !strings.Contains(said, want) {
			wrong++
			ts.Logf("%s: %v, and it says\n%swant code %s and\n%s", line, err, said, code, want)
		}
	}
	if wrong > 0 || checked < 60 {
		ts.Fatalf("%d of %d answers are wrong", wrong, checked)
	}
}
