package authenticode

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"slices"
)

// The kinds of signatures in a database (UEFI 2.10, 32.4.1), as GUIDs of UEFI.
const (
	KindX509   = "\xa1\x59\xc0\xa5\xe4\x94\xa7\x4a\x87\xb5\xab\x15\x5c\x2b\xf0\x72"
	KindSHA256 = "\x26\x16\xc4\xc1\x4c\x50\x92\x40\xac\xa9\x41\xf9\x36\x93\x43\x28"

	listHeader = 28
	ownerSize  = 16
)

// Database is db or dbx: what a firmware starts, or never starts. Other kinds of signatures are left out.
type Database struct {
	Certificates []*x509.Certificate
	Hashes       [][]byte
}

// ParseDatabase reads EFI_SIGNATURE_LISTs.
func ParseDatabase(lists []byte) (d Database, err error) {
	for len(lists) > 0 {
		if len(lists) < listHeader {
			return d, errors.New("the list of signatures is cut off")
		}
		number := func(at int) int { return int(binary.LittleEndian.Uint32(lists[at:])) }
		size, header, each := number(16), number(20), number(24)
		if size < listHeader || size > len(lists) || header > size-listHeader || each <= ownerSize {
			return d, errors.New("the list of signatures is damaged")
		}
		kind := string(lists[:16])
		for entry := range slices.Chunk(lists[listHeader+header:size], each) {
			switch data := entry[min(len(entry), ownerSize):]; kind {
			case KindX509:
				if c, err := x509.ParseCertificate(data); err == nil { // a firmware may have others
					d.Certificates = append(d.Certificates, c)
				}
			case KindSHA256:
				d.Hashes = append(d.Hashes, bytes.Clone(data))
			}
		}
		lists = lists[size:]
	}
	return d, nil
}

func (d Database) hash(i Image) bool {
	return slices.ContainsFunc(d.Hashes, func(h []byte) bool { return bytes.Equal(h, i.Hash) })
}

// has reports whether a certificate of the database vouches for a chain, which begins with the signer and goes up.
// Firmware looks at no dates.
func (d Database) has(chain []*x509.Certificate) bool {
	for n, c := range chain {
		if n > 0 && chain[n-1].CheckSignatureFrom(c) != nil {
			break
		}
		if slices.ContainsFunc(d.Certificates, func(known *x509.Certificate) bool {
			return c.Equal(known) || bytes.Equal(c.RawIssuer, known.RawSubject) && known.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature) == nil
		}) {
			return true
		}
	}
	return false
}

// Accept returns who has signed a program that a firmware with these databases starts, or why it doesn't.
func Accept(i Image, db, dbx Database) (signer string, err error) {
	if dbx.hash(i) {
		return "", errors.New("the firmware's dbx has revoked it")
	}
	if db.hash(i) {
		return "its hash in db", nil
	}
	chain, err := i.chain()
	if err != nil {
		return "", err
	}
	signer = chain[0].Subject.CommonName
	switch {
	case dbx.has(chain):
		return "", errors.New("the firmware's dbx has revoked the key of " + signer)
	case !db.has(chain):
		return "", errors.New("it is signed by " + signer + ", which the firmware's db doesn't have")
	}
	return signer, nil
}
