// Package secureboot signs what a machine with UEFI Secure Boot starts, and makes the keys for it. It needs no other
// program, except for keys in tokens.
//
//	PK ─▶ KEK ─▶ db ─▶ systemd-boot, unified kernel images, modules of the kernel
//	pcr ─▶ the value that PCR 11 of a TPM has once an image was started (pcr.go)
//
// Private keys are in a directory with the mode 0700, in files with the mode 0600, or in tokens, whose URIs these files
// then have (token.go).
package secureboot

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config/pki"
)

// Names of the keys, and of the variables of UEFI (UEFI 2.10, 32.3).
const (
	PK  = "PK"
	KEK = "KEK"
	DB  = "db"
	PCR = "pcr"
)

var names = []string{PK, KEK, DB, PCR}

const (
	// bits is what all firmware and all TPMs know.
	bits = 2048
	// validity is formal: firmware looks at no dates.
	validity = 30 * 365 * 24 * time.Hour
)

// Pair is a key with its certificate.
type Pair struct {
	Key  crypto.Signer
	Cert *x509.Certificate
}

// Keys sign systems.
type Keys struct {
	DB  Pair
	PCR crypto.Signer
	// Enrolment are the files with which systemd-boot puts the keys into a firmware (systemd-boot(7)), by name.
	Enrolment map[string][]byte
}

// newKey makes a key, or finds that of a URI in its token, and the content of its file.
func newKey(uri string) (key crypto.Signer, file []byte, err error) {
	if uri != "" {
		key, err = openToken(uri)
		return key, []byte(uri + "\n"), err
	}
	if key, err = rsa.GenerateKey(rand.Reader, bits); err == nil {
		file, err = pki.EncodeKey(key)
	}
	return key, file, err
}

func newPair(name string, key crypto.Signer, now time.Time) (p Pair, err error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return p, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "Garboard Secure Boot " + name}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(validity),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return p, err
	}
	p.Key = key
	p.Cert, err = x509.ParseCertificate(der)
	return p, err
}

// Generate makes all keys, as files by name. tokens have the URIs of those that are in tokens already, by name. added
// are certificates that db has besides the owner's.
func Generate(now time.Time, tokens map[string]string, added ...*x509.Certificate) (files map[string][]byte, err error) {
	for name := range tokens {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("key %q: must be one of %s", name, strings.Join(names, ", "))
		}
	}
	files, pairs := map[string][]byte{}, map[string]Pair{}
	for _, name := range names {
		key, file, err := newKey(tokens[name])
		if err != nil {
			return nil, err
		}
		files[name+".key"] = file
		if name == PCR {
			files[name+".pub"], err = publicPEM(key)
		} else if pairs[name], err = newPair(name, key, now); err == nil {
			files[name+".crt"] = pki.EncodeCert(pairs[name].Cert.Raw)
		}
		if err != nil {
			return nil, err
		}
	}
	for name, by := range map[string]string{PK: PK, KEK: PK, DB: KEK} {
		all := []*x509.Certificate{pairs[name].Cert}
		if name == DB {
			all = append(all, added...)
		}
		if files[name+".auth"], err = Variable(name, List(all...), pairs[by], now); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// Open reads what signs systems from a directory with the files of Generate. Private keys of PK and KEK needn't be
// there.
func Open(dir string) (*Keys, error) {
	k := &Keys{Enrolment: map[string][]byte{}}
	texts := map[string][]byte{}
	for _, name := range []string{DB + ".key", DB + ".crt", PCR + ".key", PK + ".auth", KEK + ".auth", DB + ".auth"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err = boot.IgnoreMissing(err); err != nil {
			return nil, err
		}
		if filepath.Ext(name) == ".auth" && text != nil {
			k.Enrolment[name] = text
		}
		texts[name] = text
	}
	var err error
	if k.DB.Key, err = rsaKey(texts[DB+".key"]); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, DB+".key"), err)
	}
	if k.PCR, err = rsaKey(texts[PCR+".key"]); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, PCR+".key"), err)
	}
	if k.DB.Cert, err = Certificate(texts[DB+".crt"]); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, DB+".crt"), err)
	}
	if public, ok := k.DB.Key.Public().(*rsa.PublicKey); !ok || !public.Equal(k.DB.Cert.PublicKey) {
		return nil, fmt.Errorf("%s: %s.crt is not the certificate of %s.key", dir, DB, DB)
	}
	return k, nil
}

var errNotRSA = errors.New("firmware and TPMs need an RSA key")

// rsaKey opens the key that a file has or names.
func rsaKey(text []byte) (crypto.Signer, error) {
	if uri := strings.TrimSpace(string(text)); strings.HasPrefix(uri, uriScheme) {
		return openToken(uri)
	}
	key, err := pki.ParseKey(text)
	if _, ok := key.(*rsa.PrivateKey); err == nil && !ok {
		err = errNotRSA
	}
	return key, err
}

// Certificate reads one in PEM or DER.
func Certificate(data []byte) (*x509.Certificate, error) {
	if bytes.HasPrefix(data, []byte{0x30}) {
		return x509.ParseCertificate(data)
	}
	return pki.ParseCert(data)
}

// publicPEM is a public key as systemd's stub and systemd-cryptenroll(1) have it.
func publicPEM(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), err
}
