package client

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func sample() *Config {
	return &Config{Context: "home", Contexts: map[string]*Context{
		"home": {Endpoints: []string{"cluster.example.org"}, Nodes: []string{"10.5.0.2"}, CA: "Y2E=", Crt: "Y3J0", Key: "a2V5", Via: map[string]string{"10.5.0.2": "127.0.0.1:41000"}},
		"work": {Endpoints: []string{"192.0.2.1", "192.0.2.2"}, CA: "Y2E=", Crt: "Y3J0", Key: "a2V5"},
	}}
}

// S-003
func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "config")
	if err := sample().Save(path); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample(), got); diff != "" {
		t.Error(diff)
	}
	for name, want := range map[string]fs.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %s", name, info.Mode(), err, want)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// What a later release wrote is kept, and a link is followed.
func TestSaveKeepsOthers(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "config"), filepath.Join(dir, "link")
	text := "context: a\nfuture: {x: 1}\ncontexts:\n  a:\n    endpoints: [h]\n    proxy: socks5://p\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	c, err := Load(link)
	if err != nil {
		t.Fatal(err)
	}
	c.Contexts["b"] = &Context{Endpoints: []string{"i"}}
	if err := c.Save(link); err != nil {
		t.Fatal(err)
	}
	again, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if again.Contexts["a"].Other["proxy"] != "socks5://p" || again.Other["future"] == nil || again.Contexts["b"] == nil {
		t.Errorf("got %+v", again)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info.Mode(), err)
	}
}

func TestLoadRefuses(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(filepath.Join(dir, "none"))
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "gbctl gen config") {
		t.Errorf("missing: %v", err)
	}
	for text, want := range map[string]string{
		"contexts: {a: }":                      `context "a" is empty`,
		"contexts: 3":                          "cannot unmarshal",
		strings.Repeat("#", maxConfigSize+1):   "more than 1048576",
		"context: a\ncontexts: {a: {ca: [1]}}": "cannot unmarshal",
	} {
		path := filepath.Join(dir, "config")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, want %s", text, err, want)
		}
	}
	path := filepath.Join(dir, "empty")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(path); err != nil || len(c.Contexts) != 0 {
		t.Errorf("empty: %v, %v", c, err)
	}
}

func TestMerge(t *testing.T) {
	c := &Config{}
	if renamed := c.Merge(sample()); len(renamed) != 0 {
		t.Errorf("nothing was there, yet renamed %v", renamed)
	}
	// The same again changes nothing; a namesake moves aside.
	other := sample()
	other.Contexts["home"].CA = "b3RoZXI="
	renamed := c.Merge(other)
	if diff := cmp.Diff(map[string]string{"home": "home-1"}, renamed); diff != "" {
		t.Error(diff)
	}
	if c.Context != "home-1" || len(c.Contexts) != 3 || c.Contexts["home-1"].CA != "b3RoZXI=" || c.Contexts["home"].CA != "Y2E=" {
		t.Errorf("got %+v", c)
	}
	if renamed := c.Merge(other); renamed["home"] != "home-1" || len(c.Contexts) != 3 {
		t.Errorf("merged twice: %v, %d contexts", renamed, len(c.Contexts))
	}
}

func TestCurrent(t *testing.T) {
	c := sample()
	for name, want := range map[string]*Context{"": c.Contexts["home"], "work": c.Contexts["work"]} {
		if got, err := c.Current(name); err != nil || got != want {
			t.Errorf("%q: %v, %v", name, got, err)
		}
	}
	if _, err := c.Current("x"); err == nil || err.Error() != `no context "x" in the client configuration; the contexts are home, work` {
		t.Errorf("got %v", err)
	}
	c.Context = ""
	if _, err := c.Current(""); err == nil || !strings.Contains(err.Error(), "the contexts are home, work") {
		t.Errorf("got %v", err)
	}
	if _, err := (&Config{}).Current("x"); err == nil || !strings.Contains(err.Error(), "has no contexts") {
		t.Errorf("got %v", err)
	}
}

func TestDefaultPath(t *testing.T) {
	t.Setenv(EnvConfig, "")
	t.Setenv("HOME", "/home/someone")
	if path, err := DefaultPath(); err != nil || path != "/home/someone/.garboard/config" {
		t.Errorf("%s, %v", path, err)
	}
	t.Setenv(EnvConfig, "here")
	if path, err := DefaultPath(); err != nil || path != "here" {
		t.Errorf("%s, %v", path, err)
	}
}

func TestCredentials(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := func(kind string, der []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	crt := text("CERTIFICATE", der)
	good := Context{CA: crt, Crt: crt[:76] + "\n" + crt[76:], Key: text("PRIVATE KEY", keyDER)}
	if _, pair, err := good.Credentials(); err != nil || pair.Leaf == nil {
		t.Errorf("%v, %v", pair.Leaf, err)
	}
	for want, bad := range map[string]Context{
		"ca must be base64 of PEM":  {Crt: good.Crt, Key: good.Key},
		"no certificate in ca":      {CA: good.Key, Crt: good.Crt, Key: good.Key},
		"crt and key: tls":          {CA: good.CA, Crt: good.Crt, Key: good.Crt},
		"key must be base64 of PEM": {CA: good.CA, Crt: good.Crt, Key: "?"},
	} {
		if _, _, err := bad.Credentials(); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), good.Key) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
