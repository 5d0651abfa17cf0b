// Package authenticode says who has signed a program for UEFI, and whether a firmware would start it (Windows
// Authenticode Portable Executable Signature Format; UEFI 2.10, 32.4 and 32.5). It knows SHA-256 and RSA, which each
// firmware has. What it doesn't know, it refuses: the firmware has the last word.
package authenticode

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"
)

// Object identifiers (RFC 5652; Authenticode, "SpcIndirectDataContent"), and the tags of PKCS #7's optional parts.
var (
	OIDSigned   = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	OIDIndirect = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 311, 2, 1, 4}
	OIDSHA256   = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 1}
	OIDDigest   = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 4}
)

// ContentInfo is what a signature is in (RFC 5652, 3 and 5.2).
type ContentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue `asn1:"explicit,optional,tag:0"`
}

// SignedData is RFC 5652, 5.1.
type SignedData struct {
	Version      int
	Digests      []pkix.AlgorithmIdentifier `asn1:"set"`
	Content      ContentInfo
	Certificates asn1.RawValue `asn1:"optional,tag:0"`
	Lists        asn1.RawValue `asn1:"optional,tag:1"`
	Signers      []SignerInfo  `asn1:"set"`
}

// SignerInfo is RFC 5652, 5.3.
type SignerInfo struct {
	Version    int
	Signer     IssuerSerial
	Digest     pkix.AlgorithmIdentifier
	Attributes asn1.RawValue `asn1:"optional,tag:0"`
	Algorithm  pkix.AlgorithmIdentifier
	Signature  []byte
	Unsigned   asn1.RawValue `asn1:"optional,tag:1"`
}

// IssuerSerial names a certificate.
type IssuerSerial struct {
	Issuer asn1.RawValue
	Serial *big.Int
}

// Attribute is RFC 5652, 5.3.
type Attribute struct {
	Type   asn1.ObjectIdentifier
	Values []asn1.RawValue `asn1:"set"`
}

// Indirect is the content of a signature: a hash of the program.
type Indirect struct {
	Data   asn1.RawValue
	Digest struct {
		Algorithm pkix.AlgorithmIdentifier
		Digest    []byte
	}
}

// Fields of a PE file (PE format, "Optional Header" and "The Attribute Certificate Table").
const (
	peOffset      = 0x3c
	coffSize      = 24
	magic64       = 0x20b
	checksumField = 64
	tableField    = 112 + 4*8
	entryHeader   = 8
	entryPKCS7    = 2 // WIN_CERT_TYPE_PKCS_SIGNED_DATA
	maxHeader     = 4096
	maxTable      = 1 << 20
)

// Fields are where a program has its checksum, and the place of its signatures.
func Fields(header []byte) (checksum, table int, err error) {
	if len(header) < peOffset+4 || !bytes.HasPrefix(header, []byte("MZ")) {
		return 0, 0, errors.New("it is no program for UEFI")
	}
	optional := int64(binary.LittleEndian.Uint32(header[peOffset:])) + coffSize
	if optional+tableField+8 > int64(len(header)) || binary.LittleEndian.Uint16(header[optional:]) != magic64 {
		return 0, 0, errors.New("it is no program for a 64-bit UEFI")
	}
	return int(optional) + checksumField, int(optional) + tableField, nil
}

// Image is what a firmware looks at before it starts a program.
type Image struct {
	Hash []byte
	// Size is that of the program without its signatures, in bytes.
	Size  int64
	table []byte
}

// Read hashes a program.
func Read(r io.ReaderAt, size int64) (i Image, err error) {
	header := make([]byte, min(size, maxHeader))
	if _, err := r.ReadAt(header, 0); err != nil && !errors.Is(err, io.EOF) {
		return i, err
	}
	checksum, table, err := Fields(header)
	if err != nil {
		return i, err
	}
	at, length := int64(binary.LittleEndian.Uint32(header[table:])), int64(binary.LittleEndian.Uint32(header[table+4:]))
	if i.Size = size; at != 0 {
		if at < int64(table)+8 || length > maxTable || at+length != size {
			return i, errors.New("its signatures aren't at its end")
		}
		i.Size, i.table = at, make([]byte, length)
		if _, err := r.ReadAt(i.table, at); err != nil && !errors.Is(err, io.EOF) {
			return i, err
		}
	}
	sum := sha256.New()
	for _, part := range [][2]int64{{0, int64(checksum)}, {int64(checksum) + 4, int64(table)}, {int64(table) + 8, i.Size}} {
		if _, err := io.Copy(sum, io.NewSectionReader(r, part[0], part[1]-part[0])); err != nil {
			return i, err
		}
	}
	i.Hash = sum.Sum(nil)
	return i, nil
}

// Signer is who has signed it; "": it has no valid signature.
func (i Image) Signer() string {
	chain, err := i.chain()
	if err != nil {
		return ""
	}
	return chain[0].Subject.CommonName
}

// chain begins with the certificate that has signed the program; those that came with it follow. Of several signatures,
// the first one counts.
func (i Image) chain() ([]*x509.Certificate, error) {
	if len(i.table) < entryHeader {
		return nil, errors.New("it isn't signed for Secure Boot")
	}
	length := int64(binary.LittleEndian.Uint32(i.table))
	if length < entryHeader || length > int64(len(i.table)) || binary.LittleEndian.Uint16(i.table[6:]) != entryPKCS7 {
		return nil, errors.New("its signature is no PKCS #7")
	}
	return verify(i.table[entryHeader:length], i.Hash)
}

// verify returns the certificate that has made a signature of a hash, and those beside it.
func verify(der, hash []byte) ([]*x509.Certificate, error) {
	var info ContentInfo
	var signed SignedData
	var said Indirect
	var content asn1.RawValue
	for _, part := range []struct {
		of *asn1.RawValue
		to any
	}{{&asn1.RawValue{Bytes: der}, &info}, {&info.Content, &signed}, {&signed.Content.Content, &said}, {&signed.Content.Content, &content}} {
		if _, err := asn1.Unmarshal(part.of.Bytes, part.to); err != nil {
			return nil, fmt.Errorf("its signature: %w", err)
		}
	}
	if len(signed.Signers) != 1 || !signed.Content.Type.Equal(OIDIndirect) || !said.Digest.Algorithm.Algorithm.Equal(OIDSHA256) {
		return nil, errors.New("its signature isn't one of a program, with SHA-256")
	}
	if !bytes.Equal(said.Digest.Digest, hash) {
		return nil, errors.New("it was changed since it was signed")
	}
	all, err := x509.ParseCertificates(signed.Certificates.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the certificates of its signature: %w", err)
	}
	signer := signed.Signers[0]
	for n, c := range all {
		if c.SerialNumber.Cmp(signer.Signer.Serial) == 0 && bytes.Equal(c.RawIssuer, signer.Signer.Issuer.FullBytes) {
			all[0], all[n] = all[n], all[0]
			return all, signer.check(c, content.Bytes)
		}
	}
	return nil, errors.New("its signature has no certificate")
}

// check verifies a signature of a content.
func (s SignerInfo) check(c *x509.Certificate, content []byte) error {
	key, ok := c.PublicKey.(*rsa.PublicKey)
	sum := sha256.Sum256(content)
	var attributes []Attribute
	if _, err := asn1.UnmarshalWithParams(s.Attributes.FullBytes, &attributes, "set,tag:0"); err != nil || !ok {
		return errors.New("its signature isn't one of RSA with attributes")
	}
	digest := func(a Attribute) bool { return a.Type.Equal(OIDDigest) }
	n := slices.IndexFunc(attributes, digest) // without one, the signature is of no content
	if n < 0 || slices.ContainsFunc(attributes[n+1:], digest) || len(attributes[n].Values) != 1 || !bytes.Equal(attributes[n].Values[0].Bytes, sum[:]) {
		return errors.New("its signature is of another hash")
	}
	plain := bytes.Clone(s.Attributes.FullBytes)
	plain[0] = asn1.TagSet | 0x20 // RFC 5652, 5.4
	signed := sha256.Sum256(plain)
	if rsa.VerifyPKCS1v15(key, crypto.SHA256, signed[:], s.Signature) != nil {
		return errors.New("its signature isn't valid")
	}
	return nil
}
