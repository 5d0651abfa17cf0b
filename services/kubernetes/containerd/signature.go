package containerd

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/opencontainers/go-digest"
)

// signature is one of an image, in one of cosign's formats.
type signature struct {
	content, made []byte          // what was signed, and the signature
	of            []digest.Digest // the images that it is for
	certificate   []byte          // in PEM; of the key that has made it
	chain         []byte          // in PEM; between the certificate and its authority
	broken        error           // why it can't be read
}

// verify refuses an image that isn't signed as a rule says.
func verify(ctx context.Context, image string, of digest.Digest, rule *config.ImageRule, from source) error {
	var errs, failed []error
	for _, read := range []format{taggedSignatures, bundledSignatures} {
		all, err := read(ctx, from, image, of)
		failed = append(failed, err)
		for _, s := range all {
			if err = s.check(of, rule); err == nil {
				return nil
			}
			errs = append(errs, err)
		}
	}
	if err := errors.Join(failed...); err != nil && len(errs) == 0 {
		return fmt.Errorf("signatures of image %s: %w", image, err)
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("it has no signature of cosign"))
	}
	return fmt.Errorf("image %s isn't signed as machine.images.verify demands for %s: %w", image, rule.Prefix, errors.Join(append(errs, failed...)...))
}

// check returns why a signature isn't one that a rule wants for an image.
func (s signature) check(image digest.Digest, rule *config.ImageRule) error {
	if s.broken != nil {
		return fmt.Errorf("a signature can't be read: %w", s.broken)
	}
	keys, why := s.trusted(rule)
	if !slices.ContainsFunc(keys, func(key crypto.PublicKey) bool { return made(s.content, s.made, key) }) {
		return errors.Join(errors.New("a signature is of another key"), why)
	}
	if !slices.Contains(s.of, image) {
		return fmt.Errorf("a signature is for %s, and the image is %s", strings.Trim(fmt.Sprint(s.of), "[]"), image)
	}
	return nil
}

// trusted are the keys that may have made a signature: those of the rule, and that of the certificate which the
// signature brings along.
func (s signature) trusted(rule *config.ImageRule) (keys []crypto.PublicKey, err error) {
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
	certificate, err := pki.ParseCert(s.certificate)
	if err != nil {
		return keys, err
	}
	if _, err := certificate.Verify(x509.VerifyOptions{Roots: pki.Pool(rule.Authority), Intermediates: pki.Pool(s.chain), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}}); err != nil {
		return keys, err
	}
	names := slices.Concat(certificate.EmailAddresses, lists.Of(certificate.URIs, (*url.URL).String))
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
