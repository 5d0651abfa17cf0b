package containerd

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/config"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	testImage    = "registry.example/team/image:1"
	testIdentity = "https://ci.example/build"
)

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func public(t *testing.T, key crypto.PublicKey) config.PEM {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

// signer has an authority, and a certificate of it.
type signer struct {
	key                    *ecdsa.PrivateKey
	authority, certificate config.PEM
}

func newSigner(t *testing.T, until time.Time, usage x509.ExtKeyUsage) signer {
	t.Helper()
	root, key := newKey(t), newKey(t)
	u, err := url.Parse(testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: now.Add(-time.Hour), NotAfter: until, ExtKeyUsage: []x509.ExtKeyUsage{usage}, KeyUsage: x509.KeyUsageDigitalSignature, URIs: []*url.URL{u}}
	certificate := func(template, parent *x509.Certificate, of *ecdsa.PrivateKey) config.PEM {
		der, err := x509.CreateCertificate(rand.Reader, template, parent, of.Public(), root)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	return signer{key, certificate(ca, ca, root), certificate(leaf, ca, key)}
}

// signedImage is a source that has one image.
type signedImage struct {
	lists     map[string]ocispec.Descriptor // by name
	referring []ocispec.Descriptor
	parts     map[digest.Digest][]byte
}

func (s signedImage) find(_ context.Context, name string) (ocispec.Descriptor, error) {
	d, ok := s.lists[name]
	if !ok {
		return d, errdefs.ErrNotFound
	}
	return d, nil
}

func (s signedImage) referrers(context.Context, digest.Digest, string) ([]ocispec.Descriptor, error) {
	return s.referring, nil
}

func (s signedImage) read(_ context.Context, part ocispec.Descriptor) ([]byte, error) {
	return s.parts[part.Digest], nil
}

// add adds a part, and returns its descriptor.
func (s signedImage) add(t *testing.T, part any) ocispec.Descriptor {
	t.Helper()
	text, ok := part.([]byte)
	if !ok {
		var err error
		if text, err = json.Marshal(part); err != nil {
			t.Fatal(err)
		}
	}
	d := ocispec.Descriptor{Digest: digest.FromBytes(text), Size: int64(len(text))}
	s.parts[d.Digest] = text
	return d
}

func signText(t *testing.T, key *ecdsa.PrivateKey, text []byte) []byte {
	t.Helper()
	sum := sha256.Sum256(text)
	signature, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return signature
}

// sign signs an image in the format with a tag.
func (s signedImage) sign(t *testing.T, key *ecdsa.PrivateKey, of digest.Digest, kind string, certificate []byte, change func(*ocispec.Descriptor)) {
	t.Helper()
	payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"registry.example/team/image"},"image":{"docker-manifest-digest":%q},"type":%q},"optional":null}`, of, kind)
	layer := s.add(t, payload)
	layer.Annotations = map[string]string{signatureAnnotation: base64.StdEncoding.EncodeToString(signText(t, key, payload)), certificateAnnotation: string(certificate)}
	if change != nil {
		change(&layer)
	}
	s.lists["registry.example/team/image:"+strings.ReplaceAll(digest.FromString("image").String(), ":", "-")+".sig"] = s.add(t, ocispec.Manifest{Layers: []ocispec.Descriptor{layer}})
}

// verified verifies an image, which is accepted unless an error is wanted.
func verified(t *testing.T, what string, from source, of digest.Digest, rule config.ImageRule, want string) {
	t.Helper()
	err := verify(t.Context(), testImage, of, &rule, from)
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", what, err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want) || PullReason(err.Error()) != ImageUnsigned):
		t.Errorf("%s: %v, want %q", what, err, want)
	}
}

// An image is accepted with a signature that the rule wants, and refused with all others, or with none.
func TestSignatures(t *testing.T) {
	t.Parallel()
	of, key := digest.FromString("image"), newKey(t)
	good := newSigner(t, time.Now().Add(time.Hour), x509.ExtKeyUsageCodeSigning)
	expired := newSigner(t, time.Now().Add(-time.Minute), x509.ExtKeyUsageCodeSigning)
	server := newSigner(t, time.Now().Add(time.Hour), x509.ExtKeyUsageServerAuth)
	byKey := config.ImageRule{Prefix: "registry.example/", Keys: []config.PEM{public(t, newKey(t).Public()), public(t, key.Public())}}
	by := func(s signer, identity string) config.ImageRule {
		return config.ImageRule{Prefix: "registry.example/", Authority: s.authority, Identity: identity}
	}
	for name, c := range map[string]struct {
		key         *ecdsa.PrivateKey // nil: no list of signatures
		certificate config.PEM
		rule        config.ImageRule
		of          digest.Digest
		kind        string
		change      func(*ocispec.Descriptor)
		want        string
	}{
		"key":              {key: key, rule: byKey},
		"certificate":      {key: good.key, certificate: good.certificate, rule: by(good, testIdentity)},
		"unsigned":         {rule: byKey, want: "it has no signature of cosign"},
		"another key":      {key: newKey(t), rule: byKey, want: "a signature is of another key"},
		"another image":    {key: key, rule: byKey, of: digest.FromString("other"), want: "a signature is for sha256:"},
		"another type":     {key: key, rule: byKey, kind: "atomic container signature", want: `its type is "atomic container signature"`},
		"no signature":     {key: key, rule: byKey, change: func(d *ocispec.Descriptor) { d.Annotations = nil }, want: "a signature is of another key"},
		"no base64":        {key: key, rule: byKey, change: func(d *ocispec.Descriptor) { d.Annotations[signatureAnnotation] = "%" }, want: "a signature can't be read"},
		"other identity":   {key: good.key, certificate: good.certificate, rule: by(good, "https://ci.example/other"), want: "its certificate is that of " + testIdentity},
		"other authority":  {key: good.key, certificate: good.certificate, rule: by(expired, testIdentity), want: "unknown authority"},
		"expired":          {key: expired.key, certificate: expired.certificate, rule: by(expired, testIdentity), want: "expired"},
		"server":           {key: server.key, certificate: server.certificate, rule: by(server, testIdentity), want: "incompatible key usage"},
		"no certificate":   {key: good.key, rule: by(good, testIdentity), want: "no CERTIFICATE block"},
		"another's":        {key: key, certificate: good.certificate, rule: by(good, testIdentity), want: "a signature is of another key"},
		"key, not by that": {key: good.key, certificate: good.certificate, rule: byKey, want: "a signature is of another key"},
	} {
		if c.of == "" {
			c.of = of
		}
		if c.kind == "" {
			c.kind = signedType
		}
		from := signedImage{map[string]ocispec.Descriptor{}, nil, map[digest.Digest][]byte{}}
		if c.key != nil {
			from.sign(t, c.key, c.of, c.kind, c.certificate, c.change)
		}
		verified(t, name, from, of, c.rule, c.want)
	}
}

// A bundle counts as a signature with a tag does. What it states otherwise is no signature.
func TestSignatureBundles(t *testing.T) {
	t.Parallel()
	of, key := digest.FromString("image"), newKey(t)
	good := newSigner(t, time.Now().Add(time.Hour), x509.ExtKeyUsageCodeSigning)
	byKey := config.ImageRule{Prefix: "registry.example/", Keys: []config.PEM{public(t, key.Public())}}
	byIdentity := config.ImageRule{Prefix: "registry.example/", Authority: good.authority, Identity: testIdentity}
	der, _ := pem.Decode(good.certificate)
	type envelope = map[string]any
	statement := func(of digest.Digest, predicate string) string {
		return fmt.Sprintf(`{"_type":"https://in-toto.io/Statement/v1","predicateType":%q,"subject":[{"digest":{"sha256":%q}}]}`, predicate, of.Encoded())
	}
	bundle := func(key *ecdsa.PrivateKey, payload, kind string) envelope {
		made := signText(t, key, fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(kind), kind, len(payload), payload))
		return envelope{"payload": []byte(payload), "payloadType": kind, "signatures": []envelope{{"sig": made, "keyid": ""}}}
	}
	mine := statement(of, signPredicate)
	for name, c := range map[string]struct {
		envelope    envelope
		certificate []byte
		rule        config.ImageRule
		predicate   string // in the manifest
		want        string
	}{
		"key":             {envelope: bundle(key, mine, statementType), rule: byKey, predicate: signPredicate},
		"no annotation":   {envelope: bundle(key, mine, statementType), rule: byKey},
		"certificate":     {envelope: bundle(good.key, mine, statementType), certificate: der.Bytes, rule: byIdentity},
		"another key":     {envelope: bundle(newKey(t), mine, statementType), rule: byKey, want: "a signature is of another key"},
		"no certificate":  {envelope: bundle(good.key, mine, statementType), rule: byIdentity, want: "no CERTIFICATE block"},
		"another image":   {envelope: bundle(key, statement(digest.FromString("other"), signPredicate), statementType), rule: byKey, want: "a signature is for sha256:"},
		"no image":        {envelope: bundle(key, fmt.Sprintf(`{"predicateType":%q}`, signPredicate), statementType), rule: byKey, want: "a signature is for ,"},
		"an SBOM":         {envelope: bundle(key, statement(of, "https://spdx.dev/Document"), statementType), rule: byKey, predicate: "https://spdx.dev/Document", want: "it has no signature of cosign"},
		"a hidden SBOM":   {envelope: bundle(key, statement(of, "https://spdx.dev/Document"), statementType), rule: byKey, predicate: signPredicate, want: `it states "https://spdx.dev/Document"`},
		"another type":    {envelope: bundle(key, mine, "text/plain"), rule: byKey, want: `it has 1 signatures for an envelope with "text/plain"`},
		"without a value": {envelope: envelope{"payload": []byte(mine), "payloadType": statementType}, rule: byKey, want: "it has 0 signatures"},
		"no envelope":     {rule: byKey, want: "it has 0 signatures"},
	} {
		from := signedImage{parts: map[digest.Digest][]byte{}}
		material := envelope{"publicKey": envelope{"hint": "unused"}}
		if c.certificate != nil {
			material = envelope{"certificate": envelope{"rawBytes": c.certificate}}
		}
		layer := from.add(t, envelope{"mediaType": bundleType + ".v0.3+json", "verificationMaterial": material, "dsseEnvelope": c.envelope})
		layer.MediaType = bundleType + ".v0.3+json"
		m := ocispec.Manifest{Layers: []ocispec.Descriptor{layer}}
		if c.predicate != "" {
			m.Annotations = map[string]string{predicateAnnotation: c.predicate}
		}
		other := ocispec.Manifest{Layers: []ocispec.Descriptor{{MediaType: "text/spdx", Digest: "sha256:absent"}}}
		from.referring = []ocispec.Descriptor{from.add(t, other), from.add(t, m)}
		verified(t, name, from, of, c.rule, c.want)
	}
}

func TestListName(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"registry.example/team/image:1":       "registry.example/team/image:sha256-00",
		"registry.example:5000/image":         "registry.example:5000/image:sha256-00",
		"registry.example/image:1@sha256:ab":  "registry.example/image:sha256-00",
		"ghcr.io/garboard-os/installer:v1.-x": "ghcr.io/garboard-os/installer:sha256-00",
	} {
		if got, err := listName(image, "sha256:00"); got != want || err != nil {
			t.Errorf("%s: %s, %v", image, got, err)
		}
	}
}

// What can't be read, and what isn't a signature, doesn't keep a good signature from counting. Without one, the image
// is refused.
func TestSignatureAmongOthers(t *testing.T) {
	t.Parallel()
	key, image := newKey(t), newSignedImage()
	of := digest.FromString("image")
	rule := config.ImageRule{Prefix: "registry.example/", Keys: []config.PEM{public(t, key.Public())}}
	gone := ocispec.Descriptor{Digest: digest.FromString("gone")}
	image.referring = append(image.referring, gone)
	if err := verify(t.Context(), testImage, of, &rule, image); err == nil || PullReason(err.Error()) == ImageUnsigned {
		t.Errorf("only what can't be read: %v", err)
	}
	for range maxSignatures {
		image.referring = append(image.referring, ocispec.Descriptor{Digest: digest.FromString("attestation"), Annotations: map[string]string{predicateAnnotation: "https://slsa.dev/provenance/v1"}})
	}
	others := image.referring
	image.bundle(t, key, of)
	image.referring = append(others, image.referring...)
	verified(t, "a good one among others", image, of, rule, "")
	image.bundle(t, newKey(t), of)
	image.referring = append([]ocispec.Descriptor{gone}, image.referring...)
	verified(t, "another's, and what can't be read", image, of, rule, "a signature is of another key")
}

// A mirror has "not found" for the list of what refers to an image, and containerd's client takes that for the answer
// of all. The tag of the list is asked for at each host.
func TestReferrersByTag(t *testing.T) {
	t.Parallel()
	of := digest.FromString("image")
	image := newSignedImage()
	list := image.add(t, ocispec.Index{Manifests: []ocispec.Descriptor{{Digest: digest.FromString("signature")}}})
	hosts := tagged{list: list, image: image}
	for name, want := range map[string]int{"registry.example/team/image:sha256-1": 1, "registry.example/team/image:other": 0} {
		all, err := repository{hosts, hosts}.referrers(t.Context(), of, name)
		if err != nil || len(all) != want {
			t.Errorf("%s: %v, %v", name, all, err)
		}
	}
}

// tagged is a registry with one tag that knows of no referrers.
type tagged struct {
	remotes.Resolver
	list  ocispec.Descriptor
	image signedImage
}

func (h tagged) Resolve(_ context.Context, name string) (string, ocispec.Descriptor, error) {
	if !strings.HasSuffix(name, ":sha256-1") {
		return "", ocispec.Descriptor{}, errdefs.ErrNotFound
	}
	return name, h.list, nil
}

func (h tagged) FetchReferrers(context.Context, digest.Digest, ...remotes.FetchReferrersOpt) ([]ocispec.Descriptor, error) {
	return nil, nil
}

// Fetch finds that the list is asked for without further URLs.
func (h tagged) Fetch(_ context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	if len(d.URLs) > 0 {
		return nil, errors.New("a URL is followed")
	}
	return io.NopCloser(bytes.NewReader(h.image.parts[d.Digest])), nil
}

func TestOtherURLsAreNotFollowed(t *testing.T) {
	t.Parallel()
	image := newSignedImage()
	d := image.add(t, ocispec.Index{})
	d.URLs = []string{"http://169.254.169.254/"}
	from, err := fetcher{tagged{image: image}}.Fetch(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	from.Close()
}

// Of several pulls of an image, one runs at a time.
func TestPullsOfAnImageWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Containerd{}
		over, err := c.alone(t.Context(), testImage)
		if err != nil {
			t.Fatal(err)
		}
		soon, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.alone(soon, testImage); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the second: %v", err)
		}
		time.AfterFunc(time.Hour, over)
		for range 2 {
			next, err := c.alone(t.Context(), testImage)
			if err != nil {
				t.Fatal(err)
			}
			next()
		}
	})
}
