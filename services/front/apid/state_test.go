package apid

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/front/statefile"
)

// With an error of any kind in what is written, the former state stays in use.
func TestBadStateIsNotTaken(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	good := normal(t, ca)
	b := newBench(t, good, everything())
	g := &gate{log: discard}
	g.watcher.Dir, g.watcher.Use = b.dir, g.use
	if err := g.watcher.Next(); err != nil {
		t.Fatal(err)
	}
	was := g.State()
	for name, k := range map[string]settings{
		"no authority":   {mode: api.ModeNormal, cert: good.cert, key: good.key},
		"half a pair":    {mode: api.ModeNormal, bundle: good.bundle, cert: good.cert},
		"another's key":  {mode: api.ModeNormal, bundle: good.bundle, cert: good.cert, key: normal(t, ca).key},
		"no such mode":   {mode: "open", bundle: good.bundle, cert: good.cert, key: good.key},
		"not an object":  {mode: api.ModeNormal, bundle: []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), cert: good.cert, key: good.key},
		"much too large": {mode: api.ModeNormal, bundle: append(good.bundle, make([]byte, statefile.MaxFile)...), cert: good.cert, key: good.key},
	} {
		b.write(t, k)
		if err := g.watcher.Next(); err == nil || g.State() != was {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What is told of a certificate can't say more than it does.
func TestNewCaller(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	cert, _, err := ca.Issue(pki.Leaf{CN: "eve\r\nGarboard-Roles: os:admin" + strings.Repeat("ä", 100), Orgs: []string{"os:reader", "os:reader,os:admin"}, Client: true, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	caller := newIdentity(parse(t, cert))
	if caller.name != "eve??Garboard-Roles: os:admin"+strings.Repeat("?", maxName-29) || len(caller.roles) != 1 || caller.roles[0] != "os:reader" {
		t.Errorf("%+v", caller)
	}
	if cert, _, err = ca.Issue(pki.Leaf{Orgs: []string{"os:reader"}, Client: true, Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if caller := newIdentity(parse(t, cert)); caller.name == "" {
		t.Error("a certificate without a name can't be told from none")
	}
}

// Who looks at the configuration reads the first certificate of a bundle. What else is in it doesn't end the API, which
// alone can mend it.
func TestBundleWithMore(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	k := normal(t, ca)
	for _, more := range [][]byte{k.key, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")} {
		with := k
		with.bundle = append(slices.Clone(k.bundle), more...)
		b := newBench(t, with, everything())
		if code, text, err := post(b.client(t, admin(t, ca), true), b.url(version), nil, strings.NewReader("{}")); code != http.StatusOK {
			t.Errorf("%d %s, %v", code, text, err)
		}
	}
}
