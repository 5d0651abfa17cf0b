package secureboot

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
)

// Section is a part of a unified kernel image.
type Section struct {
	Name    string
	Content []byte
}

// measured are the sections that systemd's stub measures into PCR 11, in its order (systemd-stub(7)).
var measured = []string{".linux", ".osrel", ".cmdline", ".initrd", ".ucode", ".splash", ".dtb", ".uname", ".sbat", ".pcrpkey"}

// PCR11 is the value that PCR 11 has once an image with these sections was started.
func PCR11(sections []Section) (pcr [sha256.Size]byte) {
	extend := func(data []byte) {
		sum := sha256.Sum256(data)
		pcr = sha256.Sum256(append(pcr[:], sum[:]...))
	}
	for _, name := range measured {
		for _, s := range sections {
			if s.Name == name && len(s.Content) > 0 {
				extend(append([]byte(name), 0))
				extend(s.Content)
			}
		}
	}
	return pcr
}

// signature is one of systemd-measure(1): the policy of a TPM, and its signature.
type signature struct {
	PCRs        []int  `json:"pcrs"`
	Fingerprint string `json:"pkfp"`
	Policy      string `json:"pol"`
	Signature   []byte `json:"sig"`
}

// policyPCR11 begins TPM2_PolicyPCR for PCR 11 of the SHA-256 bank, after a policy that is empty (TPM 2.0 Library, Part
// 3, 23.7).
const policyPCR11 = "\x00\x00\x01\x7f\x00\x00\x00\x01\x00\x0b\x03\x00\x08\x00"

// PolicySignature is the section .pcrsig: an image with these sections is one of the owner of the PCR key.
func (k *Keys) PolicySignature(sections []Section) ([]byte, error) {
	public, ok := k.PCR.Public().(*rsa.PublicKey)
	if !ok {
		return nil, errors.New("the PCR key must be one of RSA")
	}
	pcr := PCR11(sections)
	values := sha256.Sum256(pcr[:])
	policy := sha256.Sum256(append(append(make([]byte, sha256.Size), policyPCR11...), values[:]...))
	sum := sha256.Sum256(policy[:])
	made, err := k.PCR.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		return nil, err
	}
	fingerprint := sha256.Sum256(x509.MarshalPKCS1PublicKey(public))
	return json.Marshal(map[string][]signature{"sha256": {{[]int{11}, hex.EncodeToString(fingerprint[:]), hex.EncodeToString(policy[:]), made}}})
}

// PolicyKey is the section .pcrpkey.
func (k *Keys) PolicyKey() ([]byte, error) { return publicPEM(k.PCR) }
