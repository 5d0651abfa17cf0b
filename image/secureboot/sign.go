package secureboot

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"debug/pe"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unicode/utf16"

	"github.com/garboard-os/garboard/boot/authenticode"
	"github.com/garboard-os/garboard/kernel"
)

var (
	oidData        = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidContentType = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 3}
	oidRSA         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}

	sha256Identifier = pkix.AlgorithmIdentifier{Algorithm: authenticode.OIDSHA256, Parameters: asn1.NullRawValue}
	rsaIdentifier    = pkix.AlgorithmIdentifier{Algorithm: oidRSA, Parameters: asn1.NullRawValue}
	// peImage is an SpcPeImageData without a file's name, as other tools write it (Authenticode, "SpcPeImageData").
	peImage = asn1.RawValue{FullBytes: []byte("\x30\x17\x06\x0a\x2b\x06\x01\x04\x01\x82\x37\x02\x01\x0f\x30\x09\x03\x01\x00\xa0\x04\xa2\x02\x80\x00")}
)

func optional(tag int, bytes []byte) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, IsCompound: true, Bytes: bytes}
}

// signer signs a message for a SignedData.
func (p Pair) signer(message, attributes []byte) (s authenticode.SignerInfo, err error) {
	s = authenticode.SignerInfo{
		Version: 1, Signer: authenticode.IssuerSerial{Issuer: asn1.RawValue{FullBytes: p.Cert.RawIssuer}, Serial: p.Cert.SerialNumber},
		Digest: sha256Identifier, Algorithm: rsaIdentifier,
	}
	if attributes != nil {
		s.Attributes = optional(0, attributes)
	}
	sum := sha256.Sum256(message)
	s.Signature, err = p.Key.Sign(rand.Reader, sum[:], crypto.SHA256)
	return s, err
}

func (p Pair) signed(content authenticode.ContentInfo, s authenticode.SignerInfo) ([]byte, error) {
	return asn1.Marshal(authenticode.SignedData{
		Version: 1, Digests: []pkix.AlgorithmIdentifier{sha256Identifier}, Content: content,
		Certificates: optional(0, p.Cert.Raw), Signers: []authenticode.SignerInfo{s},
	})
}

// pkcs7 is the signature of a program with a hash.
func (p Pair) pkcs7(hash []byte) ([]byte, error) {
	said := authenticode.Indirect{Data: peImage}
	said.Digest.Algorithm, said.Digest.Digest = sha256Identifier, hash
	content, err := asn1.Marshal(said)
	if err != nil {
		return nil, err
	}
	var inner asn1.RawValue
	if _, err := asn1.Unmarshal(content, &inner); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(inner.Bytes)
	kind, err := asn1.Marshal(authenticode.OIDIndirect)
	if err != nil {
		return nil, err
	}
	digest, err := asn1.Marshal(sum[:])
	if err != nil {
		return nil, err
	}
	attributes, err := asn1.MarshalWithParams([]authenticode.Attribute{
		{Type: oidContentType, Values: []asn1.RawValue{{FullBytes: kind}}},
		{Type: authenticode.OIDDigest, Values: []asn1.RawValue{{FullBytes: digest}}},
	}, "set")
	if err != nil {
		return nil, err
	}
	var set asn1.RawValue
	if _, err := asn1.Unmarshal(attributes, &set); err != nil {
		return nil, err
	}
	s, err := p.signer(attributes, set.Bytes)
	if err != nil {
		return nil, err
	}
	signed, err := p.signed(authenticode.ContentInfo{Type: authenticode.OIDIndirect, Content: optional(0, content)}, s)
	if err != nil {
		return nil, err
	}
	return asn1.Marshal(authenticode.ContentInfo{Type: authenticode.OIDSigned, Content: optional(0, signed)})
}

// Sign signs a program for UEFI. A signature that it has is replaced.
func (p Pair) Sign(program []byte) ([]byte, error) {
	image, err := authenticode.Read(bytes.NewReader(program), int64(len(program)))
	if err != nil {
		return nil, err
	}
	if err := contiguous(program); err != nil {
		return nil, err
	}
	signed := pad(bytes.Clone(program[:image.Size]))
	_, table, err := authenticode.Fields(signed)
	if err != nil {
		return nil, err
	}
	clear(signed[table:][:8])
	if image, err = authenticode.Read(bytes.NewReader(signed), int64(len(signed))); err != nil {
		return nil, err
	}
	signature, err := p.pkcs7(image.Hash)
	if err != nil {
		return nil, err
	}
	entry := pad(append(certificate(len(signature)+8, 2), signature...))
	binary.LittleEndian.PutUint32(entry, uint32(len(entry)))
	binary.LittleEndian.PutUint32(signed[table:], uint32(len(signed)))
	binary.LittleEndian.PutUint32(signed[table+4:], uint32(len(entry)))
	return append(signed, entry...), nil
}

// SignModule signs a module of the kernel (Documentation/admin-guide/module-signing.rst; module_signature.h). A kernel
// that Secure Boot has locked down takes it, because db has the key.
func (p Pair) SignModule(module []byte) ([]byte, error) {
	s, err := p.signer(module, nil)
	if err != nil {
		return nil, err
	}
	signed, err := asn1.Marshal(authenticode.SignedData{
		Version: 1, Digests: []pkix.AlgorithmIdentifier{sha256Identifier}, Content: authenticode.ContentInfo{Type: oidData}, Signers: []authenticode.SignerInfo{s},
	})
	if err == nil {
		signed, err = asn1.Marshal(authenticode.ContentInfo{Type: authenticode.OIDSigned, Content: optional(0, signed)})
	}
	if err != nil {
		return nil, fmt.Errorf("sign a module: %w", err)
	}
	b := append(bytes.Clone(module), signed...)
	b = append(b, 0, 0, 2, 0, 0, 0, 0, 0) // PKCS #7
	return append(binary.BigEndian.AppendUint32(b, uint32(len(signed))), kernel.SignatureMark...), nil
}

// contiguous refuses a program with something between its sections, which firmware and authenticode.Read would hash in
// another order.
func contiguous(program []byte) error {
	file, err := pe.NewFile(bytes.NewReader(program))
	if err != nil {
		return err
	}
	header, ok := file.OptionalHeader.(*pe.OptionalHeader64)
	if !ok {
		return errors.New("it is no program for a 64-bit UEFI")
	}
	end := header.SizeOfHeaders
	for _, s := range file.Sections {
		if s.Size > 0 && s.Offset != end {
			return fmt.Errorf("its section %s doesn't follow the one before it: it can't be signed", s.Name)
		}
		end += s.Size
	}
	return nil
}

// pad fills up to a multiple of 8 bytes, at which signatures begin.
func pad(b []byte) []byte { return append(b, make([]byte, -len(b)&7)...) }

// certificate is a WIN_CERTIFICATE (UEFI 2.10, 32.2.4).
func certificate(length int, kind uint16) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(length))
	return binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, 0x200), kind)
}

// Identities of UEFI (UEFI 2.10, 3.3, 32.2.4 and 32.6.1), and the owner of what is in db: any value.
const (
	kindPKCS7   = "\x9d\xd2\xaf\x4a\xdf\x68\xee\x49\x8a\xa9\x34\x7d\x37\x56\x65\xa7"
	global      = "\x61\xdf\xe4\x8b\xca\x93\xd2\x11\xaa\x0d\x00\xe0\x98\x03\x2b\x8c"
	imageSafety = "\xcb\xb2\x19\xd7\x3a\x3d\x96\x45\xa3\xbc\xda\xd0\x0e\x67\x65\x6f"
	owner       = "garboard\x00\x00\x00\x00\x00\x00\x00\x00"

	// NON_VOLATILE, BOOTSERVICE_ACCESS, RUNTIME_ACCESS, TIME_BASED_AUTHENTICATED_WRITE_ACCESS.
	attributes = 0x27
)

// List is a list of certificates as db, KEK and PK have it (UEFI 2.10, 32.4.1).
func List(certs ...*x509.Certificate) (list []byte) {
	for _, c := range certs {
		list = append(list, authenticode.KindX509...)
		list = binary.LittleEndian.AppendUint32(list, uint32(28+len(owner)+len(c.Raw)))
		list = binary.LittleEndian.AppendUint32(list, 0)
		list = binary.LittleEndian.AppendUint32(list, uint32(len(owner)+len(c.Raw)))
		list = append(append(list, owner...), c.Raw...)
	}
	return list
}

// Variable is a value that a firmware takes for a variable, because it is signed (UEFI 2.10, 8.2.2,
// EFI_VARIABLE_AUTHENTICATION_2).
func Variable(name string, value []byte, by Pair, now time.Time) ([]byte, error) {
	vendor := global
	if name == DB {
		vendor = imageSafety
	}
	now = now.UTC()
	stamp := binary.LittleEndian.AppendUint16(nil, uint16(now.Year()))
	stamp = append(stamp, byte(now.Month()), byte(now.Day()), byte(now.Hour()), byte(now.Minute()), byte(now.Second()))
	stamp = append(stamp, make([]byte, 16-len(stamp))...)
	var message []byte
	for _, c := range utf16.Encode([]rune(name)) {
		message = binary.LittleEndian.AppendUint16(message, c)
	}
	message = binary.LittleEndian.AppendUint32(append(message, vendor...), attributes)
	message = append(append(message, stamp...), value...)
	s, err := by.signer(message, nil)
	if err != nil {
		return nil, err
	}
	signed, err := by.signed(authenticode.ContentInfo{Type: oidData}, s)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", name, err)
	}
	b := append(stamp, certificate(8+len(kindPKCS7)+len(signed), 0x0ef1)...)
	return append(append(append(b, kindPKCS7...), signed...), value...), nil
}
