package containerd

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// The signatures of an image with the digest sha256:HEX are an image in the same repository, with the tag sha256-HEX.sig. Each is a layer: the
// content is what was signed, and annotations have the rest
// (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).
const (
	signatureSuffix       = ".sig"
	signatureAnnotation   = "dev.cosignproject.cosign/signature"
	certificateAnnotation = "dev.sigstore.cosign/certificate"
	chainAnnotation       = "dev.sigstore.cosign/chain"
	signedType            = "cosign container image signature"

	// maxSignatures of one image, and maxSignature bytes of each, and of their list.
	maxSignatures = 64
	maxSignature  = 1 << 20
)

// signed is what is signed.
type signed struct {
	Critical struct {
		Type  string `json:"type"`
		Image struct {
			Digest digest.Digest `json:"docker-manifest-digest"`
		} `json:"image"`
	} `json:"critical"`
}

// read reads content that belongs to an image, by its digest.
type read func(ctx context.Context, part ocispec.Descriptor) ([]byte, error)

// verify refuses an image that isn't signed as a rule says. find returns the list of its signatures, or errdefs.ErrNotFound.
func verify(ctx context.Context, image string, of digest.Digest, rule *config.ImageRule, find func(context.Context) (ocispec.Descriptor, read, error)) error {
	refused := func(why error) error {
		return fmt.Errorf("image %s isn't signed as machine.images.verify demands for %s: %w", image, rule.Prefix, why)
	}
	list, content, err := find(ctx)
	if errdefs.IsNotFound(err) {
		return refused(errors.New("it has no signature of cosign"))
	}
	if err != nil {
		return fmt.Errorf("signatures of image %s: %w", image, err)
	}
	text, err := content(ctx, list)
	if err != nil {
		return fmt.Errorf("signatures of image %s: %w", image, err)
	}
	var manifest ocispec.Manifest
	if err := json.Unmarshal(text, &manifest); err != nil {
		return refused(err)
	}
	if len(manifest.Layers) > maxSignatures {
		return refused(fmt.Errorf("it has %d signatures, of which %d are looked at", len(manifest.Layers), maxSignatures))
	}
	errs := []error{}
	for _, layer := range manifest.Layers {
		payload, err := content(ctx, layer)
		if err != nil {
			return fmt.Errorf("signatures of image %s: %w", image, err)
		}
		if err = verifyOne(payload, layer.Annotations, of, rule); err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("its list of signatures is empty"))
	}
	return refused(errors.Join(errs...))
}

func verifyOne(payload []byte, annotations map[string]string, of digest.Digest, rule *config.ImageRule) error {
	signature, err := base64.StdEncoding.DecodeString(annotations[signatureAnnotation])
	if err != nil {
		return fmt.Errorf("a signature can't be read: %w", err)
	}
	keys, why := trusted(rule, annotations)
	if !slices.ContainsFunc(keys, func(key crypto.PublicKey) bool { return made(payload, signature, key) }) {
		return errors.Join(errors.New("a signature is of another key"), why)
	}
	var s signed
	if err := json.Unmarshal(payload, &s); err != nil {
		return err
	}
	if s.Critical.Type != signedType || s.Critical.Image.Digest != of {
		return fmt.Errorf("a signature is for %s, and the image is %s", s.Critical.Image.Digest, of)
	}
	return nil
}

// trusted are the keys that may have made a signature: those of the rule, and that of the certificate which the signature brings along.
func trusted(rule *config.ImageRule, annotations map[string]string) (keys []crypto.PublicKey, err error) {
	for _, text := range rule.Keys {
		key, err := pki.ParsePublicKey(text)
		if err != nil {
			return nil, err // checks refuse it
		}
		keys = append(keys, key)
	}
	if len(rule.Authority) == 0 {
		return keys, nil
	}
	certificate, err := pki.ParseCert([]byte(annotations[certificateAnnotation]))
	if err != nil {
		return keys, err
	}
	roots, chain := x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(rule.Authority)
	chain.AppendCertsFromPEM([]byte(annotations[chainAnnotation]))
	if _, err := certificate.Verify(x509.VerifyOptions{Roots: roots, Intermediates: chain, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}}); err != nil {
		return keys, err
	}
	names := slices.Clone(certificate.EmailAddresses)
	for _, u := range certificate.URIs {
		names = append(names, u.String())
	}
	if !slices.Contains(names, rule.Identity) {
		return keys, fmt.Errorf("its certificate is that of %s", strings.Join(names, ", "))
	}
	return append(keys, certificate.PublicKey), nil
}

// made reports whether a key has made a signature of a content.
func made(content, signature []byte, key crypto.PublicKey) bool {
	sum := sha256.Sum256(content)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		return ecdsa.VerifyASN1(k, sum[:], signature)
	case *rsa.PublicKey:
		return rsa.VerifyPKCS1v15(k, crypto.SHA256, sum[:], signature) == nil
	case ed25519.PublicKey:
		return ed25519.Verify(k, content, signature)
	}
	return false
}

// signatureName is the name of an image's list of signatures.
func signatureName(image string, of digest.Digest) (string, error) {
	ref, err := reference.Parse(image)
	return ref.Locator + ":" + strings.ReplaceAll(of.String(), ":", "-") + signatureSuffix, err
}

// fixed is a registry in which an image is what it was when it was verified.
type fixed struct {
	remotes.Resolver
	image, name string
	found       ocispec.Descriptor
}

// Resolve implements remotes.Resolver.
func (f fixed) Resolve(ctx context.Context, image string) (string, ocispec.Descriptor, error) {
	if image == f.image {
		return f.name, f.found, nil
	}
	return f.Resolver.Resolve(ctx, image)
}

// accept verifies an image of a registry, if there is a rule for it. What it returns has the image that was verified.
func accept(ctx context.Context, from remotes.Resolver, image string, rules config.Images) (remotes.Resolver, error) {
	rule := rules.Rule(image)
	if rule == nil {
		return from, nil
	}
	name, found, err := from.Resolve(ctx, image)
	if err != nil {
		return nil, err
	}
	err = verify(ctx, image, found.Digest, rule, func(ctx context.Context) (list ocispec.Descriptor, content read, err error) {
		signatures, err := signatureName(image, found.Digest)
		if err != nil {
			return list, nil, err
		}
		name, list, err := from.Resolve(ctx, signatures)
		if err != nil {
			return list, nil, err
		}
		fetcher, err := from.Fetcher(ctx, name)
		return list, func(ctx context.Context, part ocispec.Descriptor) ([]byte, error) {
			in, err := fetcher.Fetch(ctx, part)
			if err != nil {
				return nil, err
			}
			defer in.Close()
			return readPart(in, part)
		}, err
	})
	return fixed{from, image, name, found}, err
}

// readPart reads a small part of an image, and compares its hash.
func readPart(in io.Reader, part ocispec.Descriptor) ([]byte, error) {
	if part.Size > maxSignature {
		return nil, fmt.Errorf("%s has %d bytes, of at most %d", part.Digest, part.Size, maxSignature)
	}
	content, err := io.ReadAll(io.LimitReader(in, part.Size+1))
	if err == nil && digest.FromBytes(content) != part.Digest {
		err = fmt.Errorf("%s is damaged", part.Digest)
	}
	return content, err
}
