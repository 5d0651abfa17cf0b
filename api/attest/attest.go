// Package attest verifies what a node's TPM says of the system that runs there. Structures are named as in the TPM 2.0
// Library, Part 2.
package attest

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"

	"github.com/google/go-tpm/tpm2"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// PCRs that nodes have signed: what is in them is in docs/storage.md.
const (
	firmware   = 7
	system     = 11
	arguments  = 12
	extensions = 13
)

// Proven is what an answer proves, or has to prove; "" isn't compared.
type Proven struct {
	TPM  string // the name of its key, hexadecimal
	PCR7 string // hexadecimal
}

// Verify returns what the answer to a nonce proves of a machine, whose system the owner of a PCR key has to have
// signed; or why it proves nothing.
func Verify(answer *apiv1.AttestResponse, nonce []byte, owner *rsa.PublicKey, want Proven) (is Proven, err error) {
	key, err := tpm2.Unmarshal[tpm2.TPMTPublic](answer.Key)
	if err != nil {
		return is, fmt.Errorf("the key: %w", err)
	}
	if err := quotedBy(key, answer, nonce); err != nil {
		return is, err
	}
	name, err := tpm2.ObjectName(key)
	if err != nil {
		return is, err
	}
	is = Proven{TPM: hex.EncodeToString(name.Buffer), PCR7: hex.EncodeToString(answer.Pcrs[firmware])}
	none, opened := make([]byte, sha256.Size), sha256.Sum256([]byte(api.DisksOpen))
	pcr11 := sha256.Sum256(append(bytes.Clone(answer.System), opened[:]...))
	switch {
	case want.TPM != "" && !strings.EqualFold(want.TPM, is.TPM):
		return is, fmt.Errorf("this is another TPM: %s", is.TPM)
	case want.PCR7 != "" && !strings.EqualFold(want.PCR7, is.PCR7):
		return is, fmt.Errorf("PCR 7 is %s: other keys of Secure Boot, or it is off", is.PCR7)
	case !bytes.Equal(answer.Pcrs[arguments], none) || !bytes.Equal(answer.Pcrs[extensions], none):
		return is, errors.New("kernel arguments or extensions came from outside of the signed system (PCR 12 and 13)")
	case !bytes.Equal(answer.Pcrs[system], pcr11[:]):
		return is, errors.New("something was measured after the system, or its disks aren't open yet (PCR 11)")
	}
	return is, signed(answer, owner)
}

// signed is why PCR 11, before the disks were opened, isn't that of a system of the owner; or nil.
func signed(answer *apiv1.AttestResponse, owner *rsa.PublicKey) error {
	var banks struct {
		SHA256 []struct {
			Policy    string `json:"pol"`
			Signature []byte `json:"sig"`
			Owner     string `json:"pkfp"`
		} `json:"sha256"`
	}
	if err := json.Unmarshal(answer.Signatures, &banks); err != nil {
		return fmt.Errorf("the signatures of the system: %w", err)
	}
	p, err := tpm2.NewPolicyCalculator(tpm2.TPMAlgSHA256)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(answer.System)
	pcr := tpm2.PolicyPCR{Pcrs: selection(system), PcrDigest: tpm2.TPM2BDigest{Buffer: sum[:]}}
	if err := pcr.Update(p); err != nil {
		return err
	}
	policy, fingerprint := p.Hash().Digest, sha256.Sum256(x509.MarshalPKCS1PublicKey(owner))
	sum = sha256.Sum256(policy)
	for _, s := range banks.SHA256 {
		if s.Owner == hex.EncodeToString(fingerprint[:]) && s.Policy == hex.EncodeToString(policy) {
			return rsa.VerifyPKCS1v15(owner, crypto.SHA256, sum[:], s.Signature)
		}
	}
	return errors.New("the owner of this key hasn't signed the system that runs")
}

func selection(pcrs ...uint) tpm2.TPMLPCRSelection {
	return tpm2.TPMLPCRSelection{PCRSelections: []tpm2.TPMSPCRSelection{{Hash: tpm2.TPMAlgSHA256, PCRSelect: tpm2.PCClientCompatible.PCRs(pcrs...)}}}
}

// quotedBy is why a TPM hasn't signed the values and the nonce of an answer, or nil.
func quotedBy(key *tpm2.TPMTPublic, answer *apiv1.AttestResponse, nonce []byte) error {
	public, err := tpm2.Pub(*key)
	if err != nil {
		return err
	}
	signer, is := public.(*ecdsa.PublicKey)
	if a := key.ObjectAttributes; !is || !a.Restricted || !a.SignEncrypt || a.Decrypt || !a.FixedTPM || !a.SensitiveDataOrigin {
		return errors.New("the key isn't one that signs only what a TPM has made")
	}
	made, err := tpm2.Unmarshal[tpm2.TPMTSignature](answer.Signature)
	if err != nil {
		return fmt.Errorf("the signature: %w", err)
	}
	signature, err := made.Signature.ECDSA()
	if err != nil {
		return err
	}
	sum := sha256.Sum256(answer.Quoted)
	if !ecdsa.Verify(signer, sum[:], new(big.Int).SetBytes(signature.SignatureR.Buffer), new(big.Int).SetBytes(signature.SignatureS.Buffer)) {
		return errors.New("the signature is of another key")
	}
	attest, err := tpm2.Unmarshal[tpm2.TPMSAttest](answer.Quoted)
	if err != nil {
		return fmt.Errorf("the quote: %w", err)
	}
	quote, err := attest.Attested.Quote()
	if err != nil || attest.Magic != tpm2.TPMGeneratedValue {
		return errors.Join(errors.New("what is signed is no quote of a TPM"), err)
	}
	if extra := sha256.Sum256(nonce); !bytes.Equal(attest.ExtraData.Buffer, extra[:]) {
		return errors.New("the answer has another nonce: it was recorded before")
	}
	var values []byte
	for _, pcr := range []uint32{firmware, system, arguments, extensions} {
		values = append(values, answer.Pcrs[pcr]...)
	}
	sum = sha256.Sum256(values)
	if !bytes.Equal(tpm2.Marshal(quote.PCRSelect), tpm2.Marshal(selection(firmware, system, arguments, extensions))) || !bytes.Equal(quote.PCRDigest.Buffer, sum[:]) {
		return errors.New("the values of the PCRs aren't those that the TPM has signed")
	}
	return nil
}
