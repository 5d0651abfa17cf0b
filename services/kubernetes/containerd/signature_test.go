package containerd

import (
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
	"fmt"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

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

// sign is a layer of a list of signatures, with its content.
func sign(t *testing.T, key *ecdsa.PrivateKey, of digest.Digest, kind string) (ocispec.Descriptor, []byte) {
	t.Helper()
	payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"registry.example/team/image"},"image":{"docker-manifest-digest":%q},"type":%q},"optional":null}`, of, kind)
	sum := sha256.Sum256(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return ocispec.Descriptor{Digest: digest.FromBytes(payload), Size: int64(len(payload)), Annotations: map[string]string{signatureAnnotation: base64.StdEncoding.EncodeToString(signature)}}, payload
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
		"another type":     {key: key, rule: byKey, kind: "atomic container signature", want: "a signature is for"},
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
		parts := map[digest.Digest][]byte{}
		list := ocispec.Manifest{}
		if c.key != nil {
			layer, payload := sign(t, c.key, c.of, c.kind)
			if c.certificate != nil {
				layer.Annotations[certificateAnnotation] = string(c.certificate)
			}
			if c.change != nil {
				c.change(&layer)
			}
			list.Layers, parts[layer.Digest] = []ocispec.Descriptor{layer}, payload
		}
		text, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		parts["list"] = text
		err = verify(t.Context(), testImage, of, &c.rule, func(context.Context) (ocispec.Descriptor, read, error) {
			if c.key == nil {
				return ocispec.Descriptor{}, nil, errdefs.ErrNotFound
			}
			return ocispec.Descriptor{Digest: "list"}, func(_ context.Context, part ocispec.Descriptor) ([]byte, error) { return parts[part.Digest], nil }, nil
		})
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || PullReason(err.Error()) != ImageUnsigned):
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestSignatureName(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"registry.example/team/image:1":       "registry.example/team/image:sha256-00.sig",
		"registry.example:5000/image":         "registry.example:5000/image:sha256-00.sig",
		"registry.example/image:1@sha256:ab":  "registry.example/image:sha256-00.sig",
		"ghcr.io/garboard-os/installer:v1.-x": "ghcr.io/garboard-os/installer:sha256-00.sig",
	} {
		if got, err := signatureName(image, "sha256:00"); got != want || err != nil {
			t.Errorf("%s: %s, %v", image, got, err)
		}
	}
}
