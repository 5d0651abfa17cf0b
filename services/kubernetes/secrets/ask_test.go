package secrets

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// The hosts are those in Kubernetes' list, the ready ones first.
func TestControlPlanes(t *testing.T) {
	t.Parallel()
	server := func(id, from string, ready bool) resource.Object[balancer.APIServer] {
		return resource.Object[balancer.APIServer]{Meta: resource.Meta{ID: id}, Spec: balancer.APIServer{From: from, Ready: ready}}
	}
	got := controlPlanes([]resource.Object[balancer.APIServer]{
		server("10.5.0.2:6443", balancer.FromKubernetes, false), server("10.5.0.3:6443", balancer.FromKubernetes, true),
		server("[2001:db8::2]:6443", balancer.FromKubernetes, true), server("cluster.example.org:6443", balancer.FromConfig, true),
	})
	if want := []string{"10.5.0.3", "2001:db8::2", "10.5.0.2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The answer of a control plane is checked before it is used.
func TestCheckAnswer(t *testing.T) {
	t.Parallel()
	now := time.Now()
	authority, other := ca(t, pki.NewMachineCA), ca(t, pki.NewMachineCA)
	key, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		t.Fatal(err)
	}
	want := pki.Leaf{CN: "w1", DNS: []string{"w1"}, IPs: []netip.Addr{netip.MustParseAddr("192.0.2.20")}, Server: true, Now: now}
	public := func(key []byte) any {
		parsed, err := pki.ParseKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return parsed.Public()
	}
	sign := func(ca config.CertKey, change func(*pki.Leaf)) config.PEM {
		leaf := want
		change(&leaf)
		crt, err := ca.CA().Sign(public(key), leaf)
		if err != nil {
			t.Fatal(err)
		}
		return crt
	}
	strange, _, err := authority.CA().Issue(want)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		crt  config.PEM
		want string
	}{
		"good":              {sign(authority, func(*pki.Leaf) {}), ""},
		"nothing":           {nil, "no CERTIFICATE block"},
		"another key":       {strange, "for another key"},
		"another authority": {sign(other, func(*pki.Leaf) {}), "of another authority"},
		"another name":      {sign(authority, func(l *pki.Leaf) { l.CN = "w2" }), "can't use: for w2"},
		"not the address":   {sign(authority, func(l *pki.Leaf) { l.IPs = nil }), "can't use"},
		"expired":           {sign(authority, func(l *pki.Leaf) { l.Validity = time.Minute }), "is the clock right"},
	} {
		err := checkAnswer(tt.crt, key, authority.Crt, want)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// A certificate from an authority near its own end expires with it: it is
// accepted as long as it is valid.
func TestAnswerOfAnAuthorityNearItsEnd(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ca, err := pki.NewCA(pki.Ed25519, pki.MachineName, now, pki.RenewBefore/2)
	if err != nil {
		t.Fatal(err)
	}
	want := pki.Leaf{CN: "w1", DNS: []string{"w1"}, Server: true, Now: now}
	crt, key, err := ca.Issue(want)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkAnswer(crt, key, ca.Cert, want); err != nil {
		t.Error(err)
	}
	authority := config.CertKey{Crt: ca.Cert, Key: ca.Key}
	if kept, err := keep(config.CertKey{Crt: crt, Key: key}, authority, want); err != nil || !bytes.Equal(kept.Crt, crt) {
		t.Errorf("it is made anew, %v", err)
	}
	want.Now = now.Add(pki.RenewBefore / 2)
	if err := checkAnswer(crt, key, ca.Cert, want); err == nil {
		t.Error("one that has expired is taken")
	}
}

// The connection comes from the node's address: on a machine with several, the
// kernel would choose another one.
func TestDialFrom(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	from := netip.MustParseAddr("127.0.0.77")
	conn, err := dial(context.Background(), from, listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	if got := peer.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(); got != from {
		t.Errorf("from %s", got)
	}
}

// A worker without a signature reports which hosts it has asked.
func TestWorkerReportsWhoWasAsked(t *testing.T) {
	t.Parallel()
	c := controlPlane(t)
	c.Machine.Type = config.Worker
	c.Machine.CA.Key = nil
	b := newBench(t, c)
	want := "controller failed: no control plane signs a certificate for the machine API: no control plane is known yet: Kubernetes lists them for cluster.token, and for a node that has joined; cluster.example.org: "
	deadline := time.After(eventually.Scale(5 * time.Second))
	for {
		select {
		case line := <-b.log.lines:
			if strings.Contains(line, want) && strings.Contains(line, "there is no network") {
				return
			}
		case <-deadline:
			t.Fatalf("never said %q", want)
		}
	}
}

// A worker's certificate is for its address of the cluster's first family: control planes are
// known by theirs of that family, and none can be reached from an address of the other one.
func TestFamilyOfAWorker(t *testing.T) {
	t.Parallel()
	four, six := netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")
	for want, pods := range map[string][]netip.Prefix{"192.0.2.10": {four, six}, "2001:db8::10": {six, four}} {
		c := controlPlane(t)
		c.Cluster.Network.PodSubnets = pods
		store := resource.NewStore()
		w := store.As("test")
		addresses := network.NodeAddress{Primary: netip.MustParseAddr("192.0.2.10"), All: []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("2001:db8::10/64")}}
		for _, err := range []error{
			configuration.Configs.Put(w, configuration.ConfigID, c), network.Hostnames.Put(w, network.HostnameID, "n1"), network.Addresses.Put(w, network.AddressID, addresses),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		n, ok, err := readNode(store)
		if err != nil || !ok || n.primary.String() != want || len(n.addrs) != 2 {
			t.Errorf("%v: %s of %v (%t, %v), want %s", pods, n.primary, n.addrs, ok, err, want)
		}
	}
}
