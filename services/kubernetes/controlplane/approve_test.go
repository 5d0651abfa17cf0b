package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// servingRequest is the request of the kubelet of worker w, after a change.
func servingRequest(t *testing.T, change func(csr *x509.CertificateRequest, spec map[string]any)) kubeclient.Object {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	put(t, err)
	csr := &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:w", Organization: []string{"system:nodes"}},
		DNSNames: []string{"w"}, IPAddresses: []net.IP{net.ParseIP("10.5.0.3")},
	}
	spec := map[string]any{
		"signerName": "kubernetes.io/kubelet-serving", "username": "system:node:w",
		"groups": []any{"system:nodes", "system:authenticated"}, "usages": []any{"digital signature", "server auth"},
	}
	if change != nil {
		change(csr, spec)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, csr, key)
	put(t, err)
	if spec["request"] == nil {
		spec["request"] = base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	}
	return kubeclient.Object{"metadata": map[string]any{"name": "csr-1"}, "spec": spec}
}

// What a worker may serve with, whatever it says of itself in Kubernetes.
func TestServingRequests(t *testing.T) {
	t.Parallel()
	node := func(name string, addresses ...string) kubeclient.Object {
		list := []any{map[string]any{"type": "Hostname", "address": name}}
		for _, a := range addresses {
			list = append(list, map[string]any{"type": "InternalIP", "address": a})
		}
		return kubeclient.Object{"metadata": map[string]any{"name": name}, "status": map[string]any{"addresses": list}}
	}
	// w reports addresses of the API server and of another node as its own.
	nodes := []kubeclient.Object{
		node("w", "10.5.0.3", "fd00::3", "10.5.0.1", "10.5.0.8", "fd00::8", "10.5.0.9"), node("other", "10.5.0.9"), node("kubernetes"),
	}
	control := node("control", "10.5.0.4")
	control["metadata"].(map[string]any)["labels"] = map[string]any{config.ControlPlaneRole: ""}
	nodes = append(nodes, control)
	facts := roster.Facts{
		Names: []string{"kubernetes", "cp"}, Addresses: []netip.Addr{netip.MustParseAddr("10.5.0.1"), netip.MustParseAddr("10.96.0.1")},
		// The machine with this record hides its address in Kubernetes.
		Records: map[string]roster.Record{"hidden": {Key: "k", Address: netip.MustParseAddr("10.5.0.8"), Addresses: []netip.Addr{netip.MustParseAddr("fd00::8")}}}, Nodes: map[string]bool{"hidden": true},
	}
	type csr = x509.CertificateRequest
	ip := func(text string) func(*csr, map[string]any) {
		return func(c *csr, _ map[string]any) { c.IPAddresses = append(c.IPAddresses, net.ParseIP(text)) }
	}
	set := func(key string, value any) func(*csr, map[string]any) {
		return func(_ *csr, spec map[string]any) { spec[key] = value }
	}
	for _, tc := range []struct {
		name   string
		change func(*csr, map[string]any)
		want   string // "": approved
	}{
		{"as a kubelet asks", nil, ""},
		{"both families", ip("fd00::3"), ""},
		{"for an RSA key", set("usages", []any{"key encipherment", "digital signature", "server auth"}), ""},
		{"another's address", ip("10.5.0.7"), "address 10.5.0.7 isn't the node's"},
		{"the API server's address", ip("10.5.0.1"), "is one of the control planes'"},
		{"an address that another machine had", ip("10.5.0.8"), `also that of node "hidden"`},
		{"the second address of another machine", ip("fd00::8"), `also that of node "hidden"`},
		{"an address that two claim", ip("10.5.0.9"), `also that of node "other"`},
		{"another's name", func(c *csr, _ map[string]any) { c.DNSNames = []string{"w", "cp"} }, `name "cp"`},
		{"the API server's name", func(c *csr, spec map[string]any) {
			c.Subject.CommonName, c.DNSNames, c.IPAddresses = "system:node:kubernetes", []string{"kubernetes"}, nil
			spec["username"] = "system:node:kubernetes"
		}, `name "kubernetes" isn't the node's alone`},
		{"another control plane's", func(c *csr, spec map[string]any) {
			c.Subject.CommonName, c.DNSNames, c.IPAddresses = "system:node:control", []string{"control"}, []net.IP{net.ParseIP("10.5.0.4")}
			spec["username"] = "system:node:control"
		}, `node "control" is a control plane`},
		{"in another's name", func(c *csr, _ map[string]any) { c.Subject.CommonName = "system:node:other" }, "not the node's"},
		{"with another group", func(c *csr, _ map[string]any) { c.Subject.Organization = []string{"system:masters"} }, "not the node's"},
		{"by no node", set("username", "eve"), `"eve" isn't a node`},
		{"by nobody of the group", set("groups", []any{"system:authenticated"}), "isn't a node"},
		{"by an unknown node", func(c *csr, spec map[string]any) {
			c.Subject.CommonName, spec["username"] = "system:node:x", "system:node:x"
		}, `there is no node "x"`},
		{"as a client too", set("usages", []any{"server auth", "client auth"}), `usage "client auth"`},
		{"for nothing", func(c *csr, _ map[string]any) { c.DNSNames, c.IPAddresses = nil, nil }, "no name and no address"},
		{"for a mail address", func(c *csr, _ map[string]any) { c.EmailAddresses = []string{"a@b"} }, "e-mail"},
		{"not a request", set("request", "AAAA"), "no CERTIFICATE REQUEST block"},
		{"not base64", set("request", "?"), "request: illegal base64"},
	} {
		_, _, err := checkServing(servingRequest(t, tc.change), nodes, facts)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

// The token for joining gives no name without a key of the machine API, and the name of no other node with it: neither
// that of a control plane, nor that of a worker. Neither is a certificate renewed for who isn't that machine any more.
func TestJoiningRequests(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	machineCA, err := pki.NewMachineCA(time.Now())
	put(t, err)
	c.Machine.CA = config.CertKey{Crt: machineCA.Cert, Key: machineCA.Key}
	store := testStore(t, c)
	machineOf := func(ca pki.CA, name string) (pair config.CertKey, key string) {
		crt, private, err := ca.Issue(pki.Leaf{CN: name, DNS: []string{name}, Server: true, Now: time.Now()})
		put(t, err)
		cert, err := pki.ParseCert(crt)
		put(t, err)
		key, err = pki.KeyID(cert.PublicKey)
		put(t, err)
		return config.CertKey{Crt: crt, Key: private}, key
	}
	own, ownKey := machineOf(machineCA, "w")
	thief, _ := machineOf(machineCA, "w") // of another machine, which got the name before it was taken
	stranger, _ := machineOf(newMachineCA(t), "w")
	other, _ := machineOf(machineCA, "other")
	fresh, freshKey := machineOf(machineCA, "new")
	again, againKey := machineOf(machineCA, "deleted")
	facts := roster.Facts{
		Names: []string{"cp"}, Now: time.Now(),
		Nodes:   map[string]bool{"w": true, "unknown": true, "cp": true},
		Records: map[string]roster.Record{"w": {Key: ownKey}, "deleted": {Key: againKey, Joined: true}, "joins": {Key: "k", Since: time.Now()}},
	}
	renews := func(name string) func(*x509.CertificateRequest, map[string]any) {
		return func(_ *x509.CertificateRequest, spec map[string]any) {
			spec["username"], spec["groups"] = config.NodeUser+name, []any{nodeGroup}
		}
	}
	type csr = x509.CertificateRequest
	for _, tc := range []struct {
		name, node string
		by         config.CertKey // whose proof
		change     func(*csr, map[string]any)
		want       string
	}{
		{"a fresh name", "new", fresh, nil, ""},
		{"a fresh name, without a key", "new", config.CertKey{}, nil, "isn't signed with the key of a certificate of the machine API"},
		{"a fresh name, of a stranger", "w", stranger, nil, "signed by unknown authority"},
		{"a name whose Node was deleted", "deleted", again, nil, ""},
		{"a name whose Node was deleted, without a key", "deleted", config.CertKey{}, nil, "isn't signed"},
		{"renews its own", "w", own, renews("w"), ""},
		{"renews its own, without a proof", "w", config.CertKey{}, renews("w"), "belongs to a machine that signs"},
		{"renews the name that another machine has now", "w", thief, renews("w"), "belongs to a machine with another key"},
		{"renews after its Node was deleted", "deleted", again, renews("deleted"), "has to join again"},
		{"renews as a node of a former release", "unknown", config.CertKey{}, renews("unknown"), ""},
		{"renews another's", "w", own, renews("unknown"), "not the node's"},
		{"renews a control plane's", "cp", config.CertKey{}, renews("cp"), "one of the control planes'"},
		{"its own name again", "w", own, nil, ""},
		{"a control plane's", "cp", config.CertKey{}, nil, "one of the control planes'"},
		{"a control plane's in capitals", "CP", config.CertKey{}, nil, "one of the control planes'"},
		{"another worker's", "w", config.CertKey{}, nil, "belongs to a machine that signs"},
		{"another worker's with another key", "w", thief, nil, "belongs to a machine with another key"},
		{"with a certificate of another authority", "w", stranger, nil, "signed by unknown authority"},
		{"with another worker's proof", "w", other, nil, `or gbctl token revoke node/w if there is no such Node (the proof is of "other"`},
		{"a fresh name, before trustd has given it", "new", other, nil, `the proof is of "other"`},
		{"that of a worker that joins now", "joins", config.CertKey{}, nil, "belongs to a machine that signs"},
		{"that of a node whose machine isn't known", "unknown", config.CertKey{}, nil, "kubectl delete node unknown"},
		{"to serve with", "new", config.CertKey{}, func(_ *csr, spec map[string]any) { spec["usages"] = []any{"client auth", "server auth"} }, `usage "server auth"`},
		{"with an address", "new", config.CertKey{}, func(c *csr, _ map[string]any) { c.IPAddresses = []net.IP{net.ParseIP("10.5.0.3")} }, "names or addresses"},
		{"as an administrator", "new", config.CertKey{}, func(c *csr, _ map[string]any) { c.Subject.Organization = []string{"system:masters"} }, "not a node's"},
		{"as no node", "new", config.CertKey{}, func(c *csr, _ map[string]any) { c.Subject.CommonName = "admin" }, "not a node's"},
	} {
		request := servingRequest(t, func(c *csr, spec map[string]any) {
			c.Subject.CommonName, c.DNSNames, c.IPAddresses = config.NodeUser+tc.node, nil, nil
			spec["signerName"], spec["usages"], spec["groups"] = clientSigner, []any{"digital signature", "client auth"}, []any{joinGroup}
			if tc.change != nil {
				tc.change(c, spec)
			}
		})
		if len(tc.by.Crt) > 0 {
			text, err := base64.StdEncoding.DecodeString(request.Text("spec", "request"))
			put(t, err)
			block, _ := pem.Decode(text)
			proof, err := pki.Prove(tc.by.Crt, tc.by.Key, kubeclient.JoinPurpose, block.Bytes)
			put(t, err)
			request["metadata"].(map[string]any)["annotations"] = map[string]any{kubeclient.JoinProof: string(proof)}
		}
		name, by, err := checkClient(store, request, facts)
		if err == nil && (name != tc.node || by.Key != map[string]string{"new": freshKey, "w": ownKey, "deleted": againKey}[name] || by.Certified != (by.Key != "")) {
			t.Errorf("%s: %s is to be recorded as %+v", tc.name, name, by)
		}
		if code := reason.Of(err); (code == roster.NameTaken) != (strings.Contains(tc.want, "belongs") || strings.Contains(tc.want, "revoke") || strings.Contains(tc.want, "kubectl") || strings.Contains(tc.want, "one of the control")) {
			t.Errorf("%s: code %q of %v", tc.name, code, err)
		}
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

// Two machines want one fresh name, and both have what trustd gives a machine. One gets it, for good, and the other one
// reads why not; a request of a kubelet that can't sign waits, as that kubelet would ask again at once.
func TestNameIsClaimedOnce(t *testing.T) {
	t.Parallel()
	s := &requestServer{requests: map[string]kubeclient.Object{}, changed: make(chan struct{})}
	store := served(t, s)
	c, err := configuration.Config(store)
	put(t, err)
	ca := newMachineCA(t)
	c.Machine.CA = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	put(t, configuration.Configs.Put(store.As("test"), configuration.ConfigID, c))
	var mu sync.Mutex
	records := map[string]roster.Record{}
	rt, err := resource.NewRuntime(store, testLog(t), controllerOf(t, Options{
		Roster: func(context.Context) (roster.Facts, error) {
			mu.Lock()
			defer mu.Unlock()
			// each is asked after its grace
			return roster.Facts{Records: maps.Clone(records), Now: time.Now().Add(roster.Grace)}, nil
		},
		Enlist: func(_ context.Context, name string, r roster.Record) error {
			mu.Lock()
			defer mu.Unlock()
			if s.approved("csr-1") {
				t.Errorf("%s is recorded after the approval", name)
			}
			r.Since = time.Now()
			records[name] = r
			return nil
		},
	}, "k8s.CertificateApprovalController"))
	put(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { _ = rt.Run(ctx) })
	defer done.Wait()
	defer cancel()
	decided := func(number int, group, address, want string) {
		t.Helper()
		request := servingRequest(t, func(c *x509.CertificateRequest, spec map[string]any) {
			c.Subject.CommonName, c.DNSNames, c.IPAddresses = config.NodeUser+"new", nil, nil
			spec["signerName"], spec["usages"], spec["groups"], spec["username"] = clientSigner, []any{"digital signature", "client auth"}, []any{group}, config.NodeUser+"new"
		})
		if address != "" {
			crt, key, err := ca.Issue(pki.Leaf{CN: "new", DNS: []string{"new"}, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr(address)}, Server: true, Now: time.Now()})
			put(t, err)
			text, err := base64.StdEncoding.DecodeString(request.Text("spec", "request"))
			put(t, err)
			block, _ := pem.Decode(text)
			proof, err := pki.Prove(crt, key, kubeclient.JoinPurpose, block.Bytes)
			put(t, err)
			request["metadata"].(map[string]any)["annotations"] = map[string]any{kubeclient.JoinProof: string(proof)}
		}
		name := fmt.Sprintf("csr-%d", number)
		s.ask(name, request)
		eventually.That(t, patience, name+" is decided", func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			got := s.requests[name].List("status", "conditions")
			if len(got) != 1 || !strings.Contains(got[0].Text("type")+": "+got[0].Text("message"), want) {
				return fmt.Errorf("it is %v, want %s", got, want)
			}
			return nil
		})
	}
	decided(1, joinGroup, "10.5.0.66", "Approved")
	decided(2, joinGroup, "10.5.0.3", "Denied: the name new belongs to a machine with another key, at 10.5.0.66; give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node new, or gbctl token revoke node/new if there is no such Node")
	decided(3, nodeGroup, "10.5.0.3", "Denied: the name new belongs to a machine with another key")
	decided(4, joinGroup, "", "Denied: the name new belongs to a machine that signs")
	if r := records["new"]; !r.Certified || r.Address.String() != "10.5.0.66" {
		t.Errorf("the record is %+v", r)
	}
}

func newMachineCA(t *testing.T) pki.CA {
	t.Helper()
	ca, err := pki.NewMachineCA(time.Now())
	put(t, err)
	return ca
}

// A request is approved at once, whether it existed before or comes during the watch; one for another node isn't
// changed. A record that another control plane has changed meanwhile is no failure, which would stay as long as the
// watch.
func TestServingApproval(t *testing.T) {
	t.Parallel()
	s := &requestServer{requests: map[string]kubeclient.Object{}, changed: make(chan struct{})}
	store := served(t, s)
	s.ask("csr-1", servingRequest(t, nil))
	var serves []netip.Addr
	changed := false
	rt, err := resource.NewRuntime(store, testLog(t), controllerOf(t, Options{
		Roster: func(context.Context) (roster.Facts, error) {
			return roster.Facts{Names: []string{"kubernetes"}, Records: map[string]roster.Record{"w": {Key: "k", Taints: []string{"a"}}}, Nodes: map[string]bool{"w": true}, Now: time.Now()}, nil
		},
		Enlist: func(_ context.Context, name string, r roster.Record) error {
			if name != "w" || r.Key != "k" || len(r.Taints) != 1 || s.approved("csr-1") && serves == nil {
				t.Errorf("the addresses of %s are recorded in %+v, or after the approval", name, r)
			}
			if !changed {
				changed = true
				return errors.New("changed meanwhile")
			}
			serves = r.Addresses
			return nil
		},
	}, "k8s.CertificateApprovalController"))
	put(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { _ = rt.Run(ctx) })
	defer done.Wait()
	defer cancel()
	approved := func(name string) {
		t.Helper()
		eventually.That(t, patience, name+" is approved", func() error {
			if !s.approved(name) {
				return errors.New("not yet")
			}
			return nil
		})
	}
	approved("csr-1")
	if all := resource.Failures.List(store); len(all) != 0 {
		t.Errorf("it fails: %v", all)
	}
	s.ask("csr-2", servingRequest(t, func(c *x509.CertificateRequest, _ map[string]any) { c.DNSNames = []string{"kubernetes"} }))
	s.ask("csr-3", servingRequest(t, nil))
	approved("csr-3")
	if s.approved("csr-2") {
		t.Error("another's name is approved")
	}
	cancel()
	if done.Wait(); !slices.Equal(serves, []netip.Addr{netip.MustParseAddr("10.5.0.3")}) {
		t.Errorf("it is recorded to serve with %v", serves)
	}
}

// A control plane that is about to join has an API server to ask, and knows no nodes: it decides nothing.
func TestNoMemberOfEtcdDecides(t *testing.T) {
	t.Parallel()
	s := &requestServer{requests: map[string]kubeclient.Object{}, changed: make(chan struct{})}
	store := served(t, s)
	s.ask("csr-1", servingRequest(t, nil))
	var looked atomic.Int32
	rt, err := resource.NewRuntime(store, testLog(t), controllerOf(t, Options{Roster: func(context.Context) (roster.Facts, error) {
		looked.Add(1)
		return roster.Facts{Names: []string{"kubernetes"}, Now: time.Now()}, nil
	}}, "k8s.CertificateApprovalController"))
	put(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { _ = rt.Run(ctx) })
	defer done.Wait()
	defer cancel()
	seen := func(requests int32) {
		t.Helper()
		eventually.That(t, patience, fmt.Sprintf("%d requests are seen", requests), func() error {
			if n := looked.Load(); n < requests {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
	}
	seen(1)
	s.ask("csr-2", servingRequest(t, nil))
	seen(3) // the first one again, and the second one
	if s.approved("csr-1") {
		t.Error("it approves what it can't know")
	}
}
