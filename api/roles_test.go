package api

import (
	"slices"
	"strings"
	"testing"
)

// Every method says who may call it, and changes are for those who may change.
func TestEveryMethodHasARole(t *testing.T) {
	t.Parallel()
	if len(Methods()) < 30 {
		t.Fatalf("only %d methods are known", len(Methods()))
	}
	for _, m := range Methods() {
		if !slices.Contains(Roles(), m.Role) {
			t.Errorf("%s: role %q isn't one", m.Procedure, m.Role)
		}
		if m.Changes && m.Role == Reader {
			t.Errorf("%s changes something and is for readers", m.Procedure)
		}
		// What a reader may not have is a change or a secret: somebody wants to know who did it.
		if least := Allowed(m, []string{string(Reader)}) || m.Role == Operator || m.Role == Peer; !least && !m.Audited() {
			t.Errorf("%s is for administrators or backups, and has neither the option changes nor discloses", m.Procedure)
		}
		if !m.Changes && slices.ContainsFunc([]string{"Apply", "Reboot", "Shutdown", "Control", "Confirm", "Rollback"}, func(verb string) bool {
			return strings.HasSuffix(m.Procedure, "/"+verb)
		}) {
			t.Errorf("%s isn't audited", m.Procedure)
		}
	}
}

func TestAllowed(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		needs Role
		has   []string
		want  bool
	}{
		{Reader, []string{"os:reader"}, true},
		{Reader, []string{"os:admin"}, true},
		{Reader, []string{"other", "os:operator"}, true},
		{Operator, []string{"os:reader"}, false},
		{Operator, []string{"os:operator"}, true},
		{Admin, []string{"os:operator", "os:reader", "os:peer"}, false},
		{Admin, []string{"os:admin"}, true},
		{EtcdBackup, []string{"os:reader"}, false},
		{EtcdBackup, []string{"os:admin"}, true},
		{Peer, []string{"os:admin"}, false},
		{Reader, nil, false},
		{Reader, []string{""}, false},
		{Reader, []string{"system:masters"}, false},
		{"", []string{"os:admin", ""}, false},
		{"os:unknown", []string{"os:unknown"}, false},
	} {
		if got := Allowed(Method{Role: tt.needs}, tt.has); got != tt.want {
			t.Errorf("a method for %q, called with %q: allowed %v, want %v", tt.needs, tt.has, got, tt.want)
		}
	}
}

// Another node may call what operations on several nodes need, and nothing else.
func TestPeerMethods(t *testing.T) {
	t.Parallel()
	var got []string
	for _, m := range Methods() {
		if Allowed(m, []string{string(Peer)}) {
			got = append(got, strings.TrimPrefix(m.Procedure, "/garboard.v1."))
		}
	}
	want := []string{
		"ConfigService/Apply",
		"ConfigService/Get",
		"EtcdService/Beginning",
		"ImageService/Pull",
		"NodeService/Version",
		"ResourceService/List",
		"ServiceService/List",
	}
	if !slices.Equal(got, want) {
		t.Errorf("a peer may call %q, want %q", got, want)
	}
}

func TestLookup(t *testing.T) {
	t.Parallel()
	if m, ok := Lookup("/garboard.v1.ConfigService/Apply"); !ok || m.Role != Admin || !m.Changes || !m.Maintenance {
		t.Errorf("Apply is %+v, %v", m, ok)
	}
	if m, ok := Lookup("/v1/logs/kubelet"); !ok || m.Role != Reader {
		t.Errorf("logs are %+v, %v", m, ok)
	}
	for _, unknown := range []string{"", "/", "/garboard.v1.ConfigService/", "/garboard.v1.ConfigService/apply", "/grpc.health.v1.Health/Check", "/garboard.v1.TrustService/Sign"} {
		if _, ok := Lookup(unknown); ok {
			t.Errorf("%q is a method", unknown)
		}
	}
}
