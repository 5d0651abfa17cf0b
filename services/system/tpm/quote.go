package tpm

import (
	"crypto/sha256"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// A Quote is what the TPM has measured of this boot, signed by it. Its structures are as the TPM has them.
type Quote struct {
	Quoted, Signature, Key []byte
	PCRs                   map[uint][]byte
	Signatures             []byte // the owner's, of PCR 11
}

// attestationKey signs only what the TPM itself has made. It is made of the TPM's own seed: always the same.
var attestationKey = tpm2.TPMTPublic{
	Type: tpm2.TPMAlgECC, NameAlg: tpm2.TPMAlgSHA256,
	// NoDA: each power cut counts as a wrong authorization, and locks keys that count them.
	ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true, UserWithAuth: true, NoDA: true, Restricted: true, SignEncrypt: true},
	Parameters: tpm2.NewTPMUPublicParms(tpm2.TPMAlgECC, &tpm2.TPMSECCParms{
		CurveID: tpm2.TPMECCNistP256,
		Scheme: tpm2.TPMTECCScheme{
			Scheme:  tpm2.TPMAlgECDSA,
			Details: tpm2.NewTPMUAsymScheme(tpm2.TPMAlgECDSA, &tpm2.TPMSSigSchemeECDSA{HashAlg: tpm2.TPMAlgSHA256}),
		},
	}),
}

// Quote has the TPM sign the PCRs of its policy, with a nonce.
func (t *TPM) Quote(nonce []byte) (q Quote, err error) {
	return q, t.with(func(c transport.TPM) error {
		key, err := tpm2.CreatePrimary{PrimaryHandle: tpm2.TPMRHEndorsement, InPublic: tpm2.New2B(attestationKey)}.Execute(c)
		if err != nil {
			return err
		}
		defer flush(c, key.ObjectHandle)
		extra := sha256.Sum256(nonce)
		made, err := tpm2.Quote{
			SignHandle:     tpm2.AuthHandle{Handle: key.ObjectHandle, Name: key.Name, Auth: tpm2.PasswordAuth(nil)},
			QualifyingData: tpm2.TPM2BData{Buffer: extra[:]},
			InScheme:       tpm2.TPMTSigScheme{Scheme: tpm2.TPMAlgNull},
			PCRSelect:      selection(FirmwarePCR, SystemPCR, argumentsPCR, extensionPCR),
		}.Execute(c)
		if err != nil {
			return err
		}
		public, err := key.OutPublic.Contents()
		if err != nil {
			return err
		}
		q = Quote{Quoted: made.Quoted.Bytes(), Signature: tpm2.Marshal(made.Signature), Key: tpm2.Marshal(public), Signatures: t.text}
		q.PCRs, err = read(c, FirmwarePCR, SystemPCR, argumentsPCR, extensionPCR)
		return err
	})
}
