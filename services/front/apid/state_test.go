package apid

import (
	"net/http"
	"os"
	"path/filepath"
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
	was := b.gate.state.Load()
	for name, k := range map[string]settings{
		"no authority":   {mode: api.ModeNormal, cert: good.cert, key: good.key},
		"half a pair":    {mode: api.ModeNormal, bundle: good.bundle, cert: good.cert},
		"another's key":  {mode: api.ModeNormal, bundle: good.bundle, cert: good.cert, key: normal(t, ca).key},
		"no such mode":   {mode: "open", bundle: good.bundle, cert: good.cert, key: good.key},
		"not an object":  {mode: api.ModeNormal, bundle: []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), cert: good.cert, key: good.key},
		"much too large": {mode: api.ModeNormal, bundle: append(good.bundle, make([]byte, statefile.MaxFile)...), cert: good.cert, key: good.key},
	} {
		dir := t.TempDir()
		if err := k.toState().Write(dir, os.Getuid()); err != nil {
			t.Fatal(err)
		}
		g := &gate{watcher: statefile.Watcher{Dir: dir}, log: discard}
		g.state.Store(was)
		if err := g.watcher.Next(g.refresh); err == nil || g.state.Load() != was {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Half a change is never taken for a whole one, in whichever order it is seen.
func TestHalfAChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, second := normal(t, newCA(t)), normal(t, newCA(t))
	first.metricsCA, second.metricsCA = []byte("one"), []byte("another") // each file differs
	if err := first.toState().Write(dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	for name, data := range second.toState().Files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := read(dir); err == nil || !strings.Contains(err.Error(), "not those that it was written for") {
			t.Errorf("after %s: %v", name, err)
		}
	}
	if err := second.toState().Write(dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	if k, err := read(dir); err != nil || !k.Equal(second.toState()) {
		t.Errorf("%+v, %v", k, err)
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
