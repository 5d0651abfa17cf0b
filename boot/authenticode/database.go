package authenticode

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
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

// of is the certificate of the database that vouches for a chain, which begins with the signer and goes up; nil: there
// is none. Firmware looks at no dates.
func (d Database) of(chain []*x509.Certificate) *x509.Certificate {
	for _, known := range d.Certificates {
		for n, c := range chain {
			if n > 0 && chain[n-1].CheckSignatureFrom(c) != nil {
				break
			}
			if c.Equal(known) || bytes.Equal(c.RawIssuer, known.RawSubject) && known.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature) == nil {
				return known
			}
		}
	}
	return nil
}

// Accept returns who has signed a program that a firmware with these databases starts, or why it doesn't.
func Accept(i Image, db, dbx Database) (signer string, err error) {
	if dbx.hash(i) {
		return "", errors.New("the firmware's dbx has revoked it")
	}
	if db.hash(i) {
		return "its hash in db", nil
	}
	if !i.Signed() {
		return "", errors.New("it isn't signed for Secure Boot")
	}
	chains, err := i.Chains()
	if err != nil {
		return "", err
	}
	var names []string
	for _, chain := range chains {
		names = append(names, chain[0].Subject.CommonName)
		if dbx.of(chain) != nil {
			return "", errors.New("the firmware's dbx has revoked the key of " + chain[0].Subject.CommonName)
		}
		if db.of(chain) != nil {
			return chain[0].Subject.CommonName, nil
		}
	}
	return "", errors.New("it is signed by " + strings.Join(names, ", ") + ", which the firmware's db doesn't have")
}
