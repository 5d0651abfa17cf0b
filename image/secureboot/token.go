package secureboot

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A key in a token (PKCS #11) is used with pkcs11-tool of OpenSC. A static program can't load the token's module.
const (
	uriScheme = "pkcs11:"
	// pinVar is the variable of the environment that has the PIN.
	pinVar = "GARBOARD_PKCS11_PIN"
	// allModules is one that has the tokens of all modules that p11-kit knows.
	allModules = "libp11-kit.so.0"
	// tokenTime is enough for somebody to touch a token.
	tokenTime = time.Minute
	// digestInfo begins what RSA signs of a SHA-256 hash (RFC 8017, 9.2).
	digestInfo = "\x30\x31\x30\x0d\x06\x09\x60\x86\x48\x01\x65\x03\x04\x02\x01\x05\x00\x04\x20"
)

// uriAttributes are those of a URI that say which key it is and how to get at it (RFC 7512, 2.3 and 2.4).
var uriAttributes = []string{"token", "object", "id", "module-path"}

// refusals are what is said instead of an answer, and what somebody can do.
var refusals = []struct{ said, next string }{
	{"executable file not found", "the program pkcs11-tool, which signs with it, is missing: install Debian's package opensc"},
	{"CKR_PIN_INCORRECT", "the PIN is wrong: correct " + pinVar + ", before the token locks itself"},
	{"CKR_PIN_LOCKED", "too many PINs were wrong, and the token has locked itself: unlock it with its SO PIN or PUK"},
	{"No slot", "there is no such token: plug it in, or add ?module-path=FILE of its module to the URI"},
	{"Failed to load", "its module can't be loaded: install Debian's package libp11-kit0, or what ?module-path=FILE names"},
	{"object not found", "the token lacks its public key: write it there, with the ID of the private one"},
	{"signal: killed", "no answer in " + tokenTime.String() + ": touch the token if it waits for that, or plug it in again"},
}

// listed is a key in a list of pkcs11-tool.
var listed = regexp.MustCompile(`(?m)^(?:  label: +(.*)\n)?  ID: +([0-9a-f]+)$`)

// tokenKey is a private key in a token.
type tokenKey struct {
	of     url.Values // attributes of its URI
	id     string     // in hexadecimal digits
	public *rsa.PublicKey
}

// openToken finds the key that a URI names, in which each attribute has an effect.
func openToken(uri string) (crypto.Signer, error) {
	of, err := url.ParseQuery(strings.NewReplacer(";", "&", "?", "&", "+", "%2B").Replace(strings.TrimPrefix(uri, uriScheme)))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", uri, err)
	}
	for name, values := range of {
		if len(values) > 1 || values[0] == "" || !slices.Contains(uriAttributes, name) {
			return nil, fmt.Errorf("%s: %q: must be one of %s, with a value, and once", uri, name, strings.Join(uriAttributes, ", "))
		}
	}
	k := &tokenKey{of: of, id: hex.EncodeToString([]byte(of.Get("id")))}
	if !strings.HasPrefix(uri, uriScheme) || !of.Has("token") || !of.Has("object") && k.id == "" {
		return nil, fmt.Errorf("%s: must say which key it is: pkcs11:token=LABEL;object=LABEL, or ;id=%%01", uri)
	}
	if err := k.find(); err != nil {
		return nil, err
	}
	// A label wouldn't do: to sign, pkcs11-tool takes the first key, whatever the label is.
	der, err := k.run(nil, "--read-object", "--type", "pubkey", "--id", k.id)
	if err != nil {
		return nil, err
	}
	public, err := x509.ParsePKIXPublicKey(der)
	if k.public, _ = public.(*rsa.PublicKey); k.public == nil {
		return nil, k.errorf("%w", cmp.Or(err, errNotRSA))
	}
	return k, nil
}

// find makes sure that there is one such key, and finds its ID.
func (k *tokenKey) find() error {
	out, err := k.run(nil, "--list-objects", "--type", "privkey")
	if err != nil {
		return err
	}
	var all, found []string
	for _, m := range listed.FindAllStringSubmatch(string(out), -1) {
		all = append(all, fmt.Sprintf("%q (ID %s)", m[1], m[2]))
		if cmp.Or(k.of.Get("object"), m[1]) == m[1] && cmp.Or(k.id, m[2]) == m[2] {
			found = append(found, m[2])
		}
	}
	list := strings.Join(all, ", ")
	if len(found) != 1 || strings.Count(list, "(ID "+found[0]+")") > 1 {
		return k.errorf("the token must have one such key, with an ID of its own; it has %s", cmp.Or(list, "none with an ID"))
	}
	k.id = found[0]
	return nil
}

func (k *tokenKey) errorf(format string, args ...any) error {
	name := cmp.Or(k.of.Get("object"), "ID "+k.id)
	return fmt.Errorf("token %q, key %q: %w", k.of.Get("token"), name, fmt.Errorf(format, args...))
}

// Public is the public half.
func (k *tokenKey) Public() crypto.PublicKey { return k.public }

// Sign signs a SHA-256 hash, as PKCS #1 v1.5 has it.
func (k *tokenKey) Sign(_ io.Reader, digest []byte, _ crypto.SignerOpts) ([]byte, error) {
	signature, err := k.run(append([]byte(digestInfo), digest...), "--sign", "--mechanism", "RSA-PKCS", "--id", k.id)
	if err == nil && rsa.VerifyPKCS1v15(k.public, crypto.SHA256, digest, signature) != nil {
		err = k.errorf("the public key with the ID %s isn't that of the private one: the signature doesn't fit", k.id)
	}
	return signature, err
}

// run has pkcs11-tool do something with the token.
func (k *tokenKey) run(in []byte, args ...string) ([]byte, error) {
	if os.Getenv(pinVar) == "" {
		return nil, k.errorf("no PIN: put it into the variable %s of the environment", pinVar)
	}
	ctx, cancel := context.WithTimeout(context.Background(), tokenTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "pkcs11-tool", append([]string{"--module", cmp.Or(k.of.Get("module-path"), allModules),
		"--token-label", k.of.Get("token"), "--login", "--pin", "env:" + pinVar}, args...)...)
	var said bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &said
	out, err := cmd.Output()
	if err == nil {
		return out, nil
	}
	for _, r := range refusals {
		if strings.Contains(said.String()+err.Error(), r.said) {
			return nil, k.errorf("%s", r.next)
		}
	}
	return nil, k.errorf("pkcs11-tool: %w: %s", err, strings.TrimSpace(said.String()))
}
