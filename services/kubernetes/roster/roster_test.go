package roster

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

var (
	now     = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)
	control = netip.MustParseAddr("10.5.0.2")
	first   = netip.MustParseAddr("10.5.0.3")
	second  = netip.MustParseAddr("10.5.0.4")
)

// facts are of a cluster with a control plane, two workers of which one isn't recorded, a
// worker that joins now, one whose Node was deleted, and one that never joined.
func facts() Facts {
	return Facts{
		Names: []string{"cp-1", "cluster.example.org"}, Addresses: []netip.Addr{control}, Now: now,
		Nodes: map[string]bool{"w1": true, "old": true, "cp-1": true},
		Records: map[string]Record{
			"w1":      {Key: "k1", Address: first, Since: now.Add(-24 * time.Hour)},
			"joins":   {Key: "k2", Address: second, Since: now.Add(-time.Minute)},
			"deleted": {Key: "k3", Address: second, Since: now.Add(-time.Minute), Joined: true},
			"never":   {Key: "k4", Address: second, Since: now.Add(-time.Hour)},
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
		{"a fresh name", "w2", "", ""},
		{"a fresh name, proven", "w2", "k9", ""},
		{"its own again", "w1", "k1", ""},
		{"another's", "w1", "", "signs its requests"},
		{"another's, with another key", "w1", "k9", "another key"},
		{"another's, of the joining", "joins", "", "signs its requests"},
		{"of a node that isn't recorded", "old", "k9", "doesn't show that it is that node"},
		{"of a deleted node", "deleted", "", ""},
		{"a control plane's", "cp-1", "k1", "one of the control planes'"},
	} {
		check(t, tc.what, facts().MayJoin(tc.name, tc.key), tc.want)
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
		{"of the joining", "w1", second, `that of node "joins"`},
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
