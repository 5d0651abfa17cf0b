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
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
)

// The signatures of an image with the digest sha256:HEX are in the same repository. Until version 3 of cosign they are
// an image with the tag sha256-HEX.sig, with a layer for each: the content is what was signed, and annotations have the
// rest (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md). Since then they are bundles, in
// manifests that refer to the image (https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md). A registry
// lists what refers to an image, or else the tag sha256-HEX does
// (https://github.com/opencontainers/distribution-spec/blob/main/spec.md#listing-referrers).
const (
	signatureAnnotation   = "dev.cosignproject.cosign/signature"
	certificateAnnotation = "dev.sigstore.cosign/certificate"
	chainAnnotation       = "dev.sigstore.cosign/chain"
	signedType            = "cosign container image signature"

	bundleType          = "application/vnd.dev.sigstore.bundle" // and its version
	predicateAnnotation = "dev.sigstore.bundle.predicateType"
	signPredicate       = "https://sigstore.dev/cosign/sign/v1"
	statementType       = "application/vnd.in-toto+json"

	// maxSignatures of one image, and maxSignature bytes of each, and of their list.
	maxSignatures = 64
	maxSignature  = 1 << 20
	// verifyTimeout bounds all that is read to verify one image.
	verifyTimeout = 5 * time.Minute
)

// signatureTag is the tag of an image's signatures.
var signatureTag = regexp.MustCompile(`:sha256-[0-9a-f]{64}(\.sig)?$`)

// source has an image with its signatures.
type source interface {
	// find finds what has a name, or returns errdefs.ErrNotFound.
	find(ctx context.Context, name string) (ocispec.Descriptor, error)
	// referrers are the manifests that refer to an image. The name is that of their list.
	referrers(ctx context.Context, of digest.Digest, name string) ([]ocispec.Descriptor, error)
	read(ctx context.Context, part ocispec.Descriptor) ([]byte, error)
}

// format reads the signatures of an image that have one format.
type format func(ctx context.Context, from source, image string, of digest.Digest) ([]signature, error)

// taggedSignatures reads the format with a tag.
func taggedSignatures(ctx context.Context, from source, image string, of digest.Digest) (all []signature, err error) {
	name, err := listName(image, of)
	if err != nil {
		return nil, err
	}
	list, err := from.find(ctx, name+".sig")
	if err != nil {
		return nil, ignoreGone(err)
	}
	m, err := readJSON[ocispec.Manifest](ctx, from, list)
	if err != nil {
		return nil, err
	}
	if len(m.Layers) > maxSignatures {
		return nil, fmt.Errorf("they are %d, of at most %d", len(m.Layers), maxSignatures)
	}
	for _, layer := range m.Layers {
		payload, err := from.read(ctx, layer)
		if err != nil {
			return nil, err
		}
		all = append(all, parseTagged(payload, layer.Annotations))
	}
	return all, nil
}

func parseTagged(payload []byte, annotations map[string]string) signature {
	var signed struct {
		Critical struct {
			Type  string `json:"type"`
			Image struct {
				Digest digest.Digest `json:"docker-manifest-digest"`
			} `json:"image"`
		} `json:"critical"`
	}
	made, err := base64.StdEncoding.DecodeString(annotations[signatureAnnotation])
	if err == nil {
		err = json.Unmarshal(payload, &signed)
	}
	if err == nil && signed.Critical.Type != signedType {
		err = fmt.Errorf("its type is %q", signed.Critical.Type)
	}
	return signature{
		content: payload, made: made, of: []digest.Digest{signed.Critical.Image.Digest}, broken: err,
		certificate: []byte(annotations[certificateAnnotation]), chain: []byte(annotations[chainAnnotation]),
	}
}

// bundledSignatures reads the format with bundles. One that can't be read doesn't keep the others from counting. Other
// manifests may refer to an image, too, such as those of its SBOM.
func bundledSignatures(ctx context.Context, from source, image string, of digest.Digest) (all []signature, err error) {
	name, err := listName(image, of)
	if err != nil {
		return nil, err
	}
	referrers, err := from.referrers(ctx, of, name)
	if err != nil {
		return nil, err
	}
	states := func(annotations map[string]string) bool { // another thing than a signature
		predicate, said := annotations[predicateAnnotation]
		return said && predicate != signPredicate
	}
	referrers = slices.DeleteFunc(referrers, func(r ocispec.Descriptor) bool { return states(r.Annotations) })
	var failed []error
	if len(referrers) > maxSignatures {
		failed = append(failed, fmt.Errorf("%d manifests refer to it, of which the first %d count", len(referrers), maxSignatures))
		referrers = referrers[:maxSignatures]
	}
	for _, r := range referrers {
		m, err := readJSON[ocispec.Manifest](ctx, from, r)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		for _, layer := range m.Layers {
			if states(m.Annotations) || !strings.HasPrefix(layer.MediaType, bundleType) {
				continue
			}
			text, err := from.read(ctx, layer)
			if err != nil {
				failed = append(failed, err)
				continue
			}
			all = append(all, parseBundle(text))
		}
	}
	return all, errors.Join(failed...)
}

// parseBundle reads a bundle in whose envelope is a statement
// (https://github.com/secure-systems-lab/dsse/blob/master/protocol.md,
// https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md).
func parseBundle(text []byte) (s signature) {
	var b struct {
		Material struct {
			Certificate struct {
				Raw []byte `json:"rawBytes"`
			} `json:"certificate"`
		} `json:"verificationMaterial"`
		Envelope struct {
			Payload    []byte `json:"payload"`
			Type       string `json:"payloadType"`
			Signatures []struct {
				Sig []byte `json:"sig"`
			} `json:"signatures"`
		} `json:"dsseEnvelope"`
	}
	if s.broken = json.Unmarshal(text, &b); s.broken != nil {
		return s
	}
	e := b.Envelope
	if e.Type != statementType || len(e.Signatures) != 1 {
		s.broken = fmt.Errorf("it has %d signatures for an envelope with %q", len(e.Signatures), e.Type)
		return s
	}
	var statement struct {
		Predicate string `json:"predicateType"`
		Subject   []struct {
			Digest map[string]string `json:"digest"`
		} `json:"subject"`
	}
	if s.broken = json.Unmarshal(e.Payload, &statement); s.broken != nil {
		return s
	}
	if statement.Predicate != signPredicate {
		s.broken = fmt.Errorf("it states %q", statement.Predicate)
		return s
	}
	for _, subject := range statement.Subject {
		for algorithm, hex := range subject.Digest {
			s.of = append(s.of, digest.NewDigestFromEncoded(digest.Algorithm(algorithm), hex))
		}
	}
	s.content = fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(e.Type), e.Type, len(e.Payload), e.Payload)
	s.made = e.Signatures[0].Sig
	if raw := b.Material.Certificate.Raw; len(raw) > 0 {
		s.certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
	}
	return s
}

// readJSON reads a part of an image that is a JSON document.
func readJSON[T any](ctx context.Context, from source, d ocispec.Descriptor) (part T, err error) {
	text, err := from.read(ctx, d)
	if err == nil {
		err = json.Unmarshal(text, &part)
	}
	return part, err
}

// listName is the name of the list of what refers to an image.
func listName(image string, of digest.Digest) (string, error) {
	ref, err := reference.Parse(image)
	return ref.Locator + ":" + strings.ReplaceAll(of.String(), ":", "-"), err
}

// repository is a source in a registry.
type repository struct {
	remotes.Resolver
	remotes.Fetcher
}

func (r repository) find(ctx context.Context, name string) (ocispec.Descriptor, error) {
	_, d, err := r.Resolve(ctx, name)
	return d, err
}

func (r repository) referrers(ctx context.Context, of digest.Digest, name string) ([]ocispec.Descriptor, error) {
	all, err := fetcher{r.Fetcher}.FetchReferrers(ctx, of)
	if err != nil || len(all) > 0 {
		return all, err
	}
	// The client takes "not found" of a mirror for an answer, and doesn't ask the next host for the list.
	list, err := r.find(ctx, name)
	if err != nil {
		return nil, ignoreGone(err)
	}
	return indexed(ctx, r, list)
}

func (r repository) read(ctx context.Context, part ocispec.Descriptor) ([]byte, error) {
	return readPart(part, func() (io.ReadCloser, error) { return r.Fetch(ctx, part) })
}

// archive is a source in a file of the OCI image layout.
type archive struct {
	io.ReadSeeker
	images map[string]ocispec.Descriptor // by name
}

func (a archive) find(_ context.Context, name string) (ocispec.Descriptor, error) {
	d, ok := a.images[name]
	if !ok {
		return d, errdefs.ErrNotFound
	}
	return d, nil
}

func (a archive) referrers(ctx context.Context, _ digest.Digest, name string) ([]ocispec.Descriptor, error) {
	list, ok := a.images[name]
	if !ok {
		return nil, nil
	}
	return indexed(ctx, a, list)
}

// indexed is what an index lists.
func indexed(ctx context.Context, from source, list ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	index, err := readJSON[ocispec.Index](ctx, from, list)
	return index.Manifests, err
}

func (a archive) read(_ context.Context, part ocispec.Descriptor) ([]byte, error) {
	return readPart(part, func() (io.ReadCloser, error) {
		file, err := archiveFile(a, path.Join(ocispec.ImageBlobsDir, part.Digest.Algorithm().String(), part.Digest.Encoded()))
		return io.NopCloser(file), err
	})
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
	fetcher, err := from.Fetcher(ctx, name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	err = verify(ctx, image, found.Digest, rule, repository{from, fetcher})
	return fixed{from, image, name, found}, err
}

// readPart reads a small part of an image, and compares its hash.
func readPart(part ocispec.Descriptor, open func() (io.ReadCloser, error)) ([]byte, error) {
	if err := part.Digest.Validate(); err != nil {
		return nil, fmt.Errorf("%q: %w", part.Digest, err)
	}
	if part.Size > maxSignature {
		return nil, fmt.Errorf("%s has %d bytes, of at most %d", part.Digest, part.Size, maxSignature)
	}
	in, err := open()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	content, err := io.ReadAll(io.LimitReader(in, part.Size+1))
	if err == nil && digest.FromBytes(content) != part.Digest {
		err = fmt.Errorf("%s is damaged", part.Digest)
	}
	return content, err
}

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
