//go:build e2e

package controlplane

import (
	"fmt"
	"slices"
	"testing"
)

// An endpoint that is older than the last ones can be set again: all control planes accept its tokens once it is
// recorded.
func TestRealForgottenIssuer(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.prepare()
	n.runControllers()
	n.startEtcd()
	record := func(endpoint string) []string {
		t.Helper()
		put(t, RecordIssuer(t.Context(), n.store, endpoint))
		all, err := recordIssuer(t.Context(), n.store, n.etcdURL, endpoint) // as another control plane finds them
		put(t, err)
		return all
	}
	const first = "https://first.example.org:6443"
	record(first)
	for i := range maxIssuers {
		record(fmt.Sprintf("https://e%d.example.org:6443", i))
	}
	found := record("https://e0.example.org:6443")
	if slices.Contains(found, first) {
		t.Fatalf("%s isn't older than the last %d: %q", first, maxIssuers, found)
	}
	record(first)
	// The node's own controller records its endpoint, too, and has what etcd has.
	if found = record("https://e7.example.org:6443"); !slices.Contains(found, first) || len(found) > maxIssuers {
		t.Errorf("%s isn't accepted again: %q", first, found)
	}
}
