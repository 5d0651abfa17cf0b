package apid

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
)

// Each refused call of somebody who is known is told to PID 1, also of one that has gone before its answer; clients
// can't tell anything there themselves.
func TestRefusalsAreTold(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	bob := b.client(t, shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}}), true)
	m := methodOf(t, "/garboard.v1.FileService/Read")
	if err := ask(t.Context(), bob, b.url(""), m); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Fatal(err)
	}
	told, count := b.backend.refused()
	if count != 1 || told.Peer != "bob" || !slices.Equal(told.Roles, []string{"os:reader"}) || told.Procedure != m.Procedure ||
		told.Code != connect.CodePermissionDenied || !strings.HasPrefix(told.Remote, "127.0.0.1:") || !strings.Contains(told.Why, "os:admin") {
		t.Errorf("%d, %+v", count, told)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.gate.refuse(httptest.NewRequest(http.MethodPost, m.Procedure, nil).WithContext(ctx), identity{name: "gone"}, connect.NewError(connect.CodePermissionDenied, errors.New("no")))
	if told, count := b.backend.refused(); count != 2 || told.Peer != "gone" {
		t.Errorf("%d, %+v", count, told)
	}
	for _, cert := range []*tls.Certificate{admin(t, ca), shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}})} {
		if code, text, err := post(b.client(t, cert, true), b.url(api.Refusals), nil, strings.NewReader(`{"Peer":"eve"}`)); err != nil || code != http.StatusForbidden {
			t.Errorf("%d %s, %v", code, text, err)
		}
		if told, _ := b.backend.refused(); told.Peer == "eve" || told.Procedure != api.Refusals {
			t.Errorf("%+v", told)
		}
	}
	if seen := b.backend.take(); len(seen) > 0 {
		t.Errorf("%d calls reached PID 1", len(seen))
	}
}
