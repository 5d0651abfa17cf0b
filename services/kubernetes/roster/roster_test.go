package roster

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	now     = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)
	control = netip.MustParseAddr("10.5.0.2")
	first   = netip.MustParseAddr("10.5.0.3")
	second  = netip.MustParseAddr("10.5.0.4")
	sixth   = netip.MustParseAddr("fd00::3") // of the first one, in IPv6
)

// facts are of a cluster with a control plane, two workers of which one isn't recorded, a worker that joins now, one
// whose Node was deleted, one that never joined, and one that has a client certificate and made no Node.
func facts() Facts {
	return Facts{
		Names: []string{"cp-1", "cluster.example.org"}, Addresses: []netip.Addr{control}, Now: now,
		Nodes: map[string]bool{"w1": true, "old": true, "cp-1": true},
		Records: map[string]Record{
			"w1":      {Key: "k1", Address: first, Addresses: []netip.Addr{first, sixth}, Taints: []string{"a=NoSchedule"}, Since: now.Add(-24 * time.Hour)},
			"joins":   {Key: "k2", Address: netip.MustParseAddr("10.5.0.5"), Since: now.Add(-time.Minute)},
			"deleted": {Key: "k3", Address: second, Since: now.Add(-time.Minute), Joined: true},
			"never":   {Key: "k4", Address: second, Since: now.Add(-time.Hour)},
			"holds":   {Key: "k5", Address: second, Since: now.Add(-time.Hour), Certified: true},
			"cp-1":    {Address: control, Addresses: []netip.Addr{control}, Joined: true},
		},
	}
}

func check(t *testing.T, what string, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: %v, want %q", what, err, want)
	}
}

// A machine gets a free name, and keeps the one that it has.
func TestMaySign(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		what, name, key string
		from            netip.Addr
		proven          bool
		want            string
	}{
		{"a fresh name", "w2", "k9", second, false, ""},
		{"its own again", "w1", "k1", first, false, ""},
		{"its own at another address", "w1", "k1", second, false, ""},
		{"another's", "w1", "k9", second, false, "another key, at 10.5.0.3; give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node w1"},
		{"another's, of the joining", "joins", "k9", first, false, "another key"},
		{"its own with a new key, as the node", "w1", "k9", first, true, ""},
		{"of a node that isn't recorded", "old", "k9", first, false, "doesn't show that it is that node"},
		{"of a node that isn't recorded, as that node", "old", "k9", first, true, ""},
		{"of a deleted node", "deleted", "k9", first, false, ""},
		{"of a machine that never joined", "never", "k9", first, false, ""},
		{"of a machine that may join at any time", "holds", "k9", first, false, "another key, at 10.5.0.4; give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node holds, or gbctl token revoke node/holds if there is no such Node"},
		{"a control plane's", "cp-1", "k9", second, true, "one of the control planes'"},
		{"a control plane's, in capitals", "CP-1", "k9", second, false, "one of the control planes'"},
		{"the endpoint's", "cluster.example.org", "k9", second, false, "one of the control planes'"},
		{"from a control plane", "w2", "k9", control, false, "one of the control planes'"},
	} {
		check(t, tc.what, facts().MaySign(tc.name, tc.key, tc.from, tc.proven), tc.want)
	}
	check(t, "before the cluster begins", Facts{Names: []string{"cp-1"}}.MaySign("w1", "k", first, false), "")
}

func TestMayJoin(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ what, name, key, want string }{
		{"a fresh name", "w2", "", "isn't signed with the key of a certificate of the machine API"},
		{"a fresh name, proven", "w2", "k9", ""},
		{"its own again", "w1", "k1", ""},
		{"its own, which it has without a Node", "holds", "k5", ""},
		{"that of a machine that may join at any time", "holds", "k9", "gbctl token revoke node/holds"},
		{"another's", "w1", "", "signs its requests"},
		{"another's, with another key", "w1", "k9", "another key"},
		{"another's, of the joining", "joins", "", "signs its requests"},
		{"of a node that isn't recorded", "old", "k9", "doesn't show that it is that node"},
		{"of a deleted node", "deleted", "", "isn't signed"},
		{"of a deleted node, proven", "deleted", "k9", ""},
		{"a control plane's", "cp-1", "k1", "one of the control planes'"},
	} {
		check(t, tc.what, facts().MayJoin(tc.name, tc.key), tc.want)
	}
}

// Who has the certificate of a node has it renewed as long as the name is that machine's. Kubelets of nodes that a
// former release left unrecorded can't sign.
func TestMayRenew(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ what, name, key, want string }{
		{"its own", "w1", "k1", ""},
		{"its own, without a proof", "w1", "", "signs its requests"},
		{"with another key: the machine was reinstalled", "w1", "k9", "another key"},
		{"a node that isn't recorded", "old", "", ""},
		{"a node that isn't recorded, and signs", "old", "k9", ""},
		{"its Node was deleted", "deleted", "k3", "has to join again"},
		{"its Node was deleted, and it doesn't sign", "deleted", "", "has to join again"},
		{"no Node has it", "w2", "", "has to join again"},
		{"a control plane's", "cp-1", "", "one of the control planes'"},
		{"it made no Node", "holds", "k5", ""},
		{"it made no Node, and another has its certificate", "holds", "", "signs its requests"},
	} {
		check(t, tc.what, facts().MayRenew(tc.name, tc.key), tc.want)
	}
	// A control plane that has left is in no list, and has no key.
	f := facts()
	f.Names = nil
	check(t, "a former control plane's", f.MayRenew("cp-1", ""), "signs its requests")
}

// A control plane's name isn't a worker's, and its own record is none of a worker.
func TestMayControl(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"w2": "", "deleted": "", "never": "", "cp-1": "", "old": "",
		"w1": "belongs to a worker, at 10.5.0.3; give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node w1", "holds": "gbctl token revoke node/holds"} {
		check(t, name, facts().MayControl(name), want)
	}
}

// A record goes on while the machine has the name, and begins anew for another machine.
func TestRenewed(t *testing.T) {
	t.Parallel()
	f := facts()
	for name, r := range f.Records {
		r.Revision = 7
		f.Records[name] = r
	}
	if r := f.Renewed("w1", Record{Key: "k1", Address: second}); !r.Since.Equal(now.Add(-24*time.Hour)) || r.Revision != 7 || r.Address != second || r.Certified || !slices.Contains(r.Addresses, sixth) || len(r.Taints) != 1 {
		t.Errorf("another address: %+v", r)
	}
	if r := f.Renewed("holds", Record{Key: "k6", Address: second}); !r.Certified || r.Key != "k6" {
		t.Errorf("the next key of the machine: %+v", r)
	}
	if r := f.Renewed("deleted", Record{Key: "k9", Address: second}); !r.Since.Equal(now) || r.Joined || r.Revision != 7 || r.Taints != nil {
		t.Errorf("another machine: %+v", r)
	}
}

// What a Node object says of its addresses takes none from others.
func TestMayServe(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		what, name string
		address    netip.Addr
		want       string
	}{
		{"its own", "w1", first, ""},
		{"of one that isn't recorded", "old", netip.MustParseAddr("10.5.0.9"), ""},
		{"another's", "old", first, `that of node "w1"`},
		{"another's, of its second family", "old", sixth, `that of node "w1"`},
		{"its own, of the second family", "w1", sixth, ""},
		{"of the joining", "w1", netip.MustParseAddr("10.5.0.5"), `that of node "joins"`},
		{"a control plane's", "w1", control, "control planes'"},
	} {
		check(t, tc.what, facts().MayServe(tc.name, tc.address), tc.want)
	}
}

func TestAdmits(t *testing.T) {
	t.Parallel()
	const configured, made, ended = "cccccc.0123456789abcdef", "mmmmmm.0123456789abcdef", "eeeeee.0123456789abcdef"
	f := Facts{Now: now, Tokens: map[string]Token{"mmmmmm": NewToken(made, now.Add(time.Minute)), "eeeeee": NewToken(ended, now)}}
	for _, tc := range []struct {
		what, token, configured string
		want                    bool
	}{
		{"that of the configuration", configured, configured, true},
		{"a made one", made, configured, true},
		{"one that has ended", ended, configured, false},
		{"that of the configuration, which has ended", ended, ended, false},
		{"its ID only", "mmmmmm", configured, false},
		{"another secret", "mmmmmm.0123456789abcdeg", configured, false},
		{"another secret with the ID of the configuration's", "cccccc.0123456789abcdeg", configured, false},
		{"none", "", configured, false},
		{"one of the configuration with the ID of another", "mmmmmm.0123456789abcdeg", "mmmmmm.0123456789abcdeg", false},
	} {
		if got := f.Admits(tc.token, tc.configured); got != tc.want {
			t.Errorf("%s: %t", tc.what, got)
		}
	}
}
