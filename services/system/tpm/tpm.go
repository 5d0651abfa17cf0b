// Package tpm seals secrets by the machine's TPM 2.0. A secret comes back only on the same TPM, to a system of the same
// owner, which the firmware has started with the same keys of Secure Boot, and only before Close:
//
//	PCR 7    the firmware's keys and Secure Boot   as it was when the secret was sealed
//	PCR 11   the system itself                     as a signature of the PCR key says, which is in the system
//	PCR 12   arguments from outside of the system  zero: there are none
//	PCR 13   extensions from outside of it         zero
//
// The PCRs are those of systemd-stub(7), and the signature is that of systemd-measure(1). Commands and structures are
// named as in the TPM 2.0 Library, Part 2 and 3.
package tpm

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/api"
)

const (
	// Device is the kernel's way to the TPM, which other programs may use at the same time.
	Device = "/dev/tpmrm0"
	// keyFile and signatureFile are what the boot loader's stub takes out of the system that it starts.
	keyFile       = "tpm2-pcr-public-key.pem"
	signatureFile = "tpm2-pcr-signature.json"

	nonce = 16  // the size of a session's nonces, in bytes
	aes   = 128 // the size of its key, in bits

	// triesOfPCRs: while a policy is proven, the kernel may measure something else, such as a module (PCR 10).
	triesOfPCRs = 30
)

// ErrNone is the error of a machine without a TPM.
var ErrNone = errors.New("this machine has no TPM 2.0, or it is off in the firmware's menu")

// PCRs of the policy.
const (
	FirmwarePCR  = 7
	SystemPCR    = 11
	argumentsPCR = 12
	extensionPCR = 13
)

// A TPM is that of the machine.
type TPM struct {
	Open func() (transport.TPMCloser, error)
	// key and signatures are the owner's, in the running system; nil: it isn't signed.
	key        *rsa.PublicKey
	signatures []signature
	text       []byte // the signatures, as the stub has left them
	why        error  // the system has none
}

// A signature says that a PCR 11 is that of a system of the owner.
type signature struct {
	Fingerprint string `json:"pkfp"` // of the key that made it
	Policy      string `json:"pol"`  // TPM2_PolicyPCR with the value
	Signature   []byte `json:"sig"`
}

// New is the TPM of a machine whose boot loader has left files in a directory.
func New(dir string) *TPM {
	t := &TPM{Open: open}
	t.why = t.read(dir)
	return t
}

// device hides its file from go-tpm, which would poll it: a signal to PID 1 ends a poll. The kernel has the answer when
// a write to a blocking file returns.
type device struct{ io.ReadWriteCloser }

func open() (transport.TPMCloser, error) {
	fd, err := unix.Open(Device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: Device, Err: err}
	}
	return transport.FromReadWriteCloser(device{os.NewFile(uintptr(fd), Device)}), nil
}

func (t *TPM) read(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, keyFile))
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("the running system isn't signed with a PCR key (gbctl image build --sign), or its boot loader found no TPM")
	}
	if err == nil {
		t.key, err = PolicyKey(text)
	}
	if err != nil {
		return err
	}
	if t.text, err = os.ReadFile(filepath.Join(dir, signatureFile)); err != nil {
		return err
	}
	var banks struct {
		SHA256 []signature `json:"sha256"`
	}
	err = json.Unmarshal(t.text, &banks)
	t.signatures = banks.SHA256
	return err
}

// PolicyKey is the public key of the section .pcrpkey of a system.
func PolicyKey(text []byte) (*rsa.PublicKey, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("the PCR key isn't PEM")
	}
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	if public, ok := key.(*rsa.PublicKey); ok {
		return public, nil
	}
	return nil, errors.Join(errors.New("the PCR key isn't one of RSA"), err)
}

// sealed is what Unseal needs. It is no secret.
type sealed struct {
	Public  []byte `json:"public"`  // TPM2B_PUBLIC and TPM2B_PRIVATE of the sealed object
	Private []byte `json:"private"` // encrypted by the TPM
	Parent  []byte `json:"parent"`  // the name of the key that has encrypted it: another TPM in between has another one
	Key     []byte `json:"key"`     // the PCR key, PKCS #1
}

// For reports whether a secret was sealed for a PCR key; nil: that of the running system.
func (t *TPM) For(text []byte, key *rsa.PublicKey) bool {
	var s sealed
	err := json.Unmarshal(text, &s)
	key = cmp.Or(key, t.key)
	return err == nil && key != nil && bytes.Equal(s.Key, x509.MarshalPKCS1PublicKey(key))
}

// Seal returns what Unseal needs to get a secret back, for systems with a PCR key; nil: that of the running one.
func (t *TPM) Seal(secret []byte, key *rsa.PublicKey) (text []byte, err error) {
	if err := t.Usable(); err != nil {
		return nil, err
	}
	key = cmp.Or(key, t.key)
	return text, t.use(func(c transport.TPM, parent *tpm2.CreatePrimaryResponse) error {
		now, err := read(c, FirmwarePCR)
		if err != nil {
			return err
		}
		policy, err := policyOf(key, now[FirmwarePCR])
		if err != nil {
			return err
		}
		salt, err := salted(parent)
		if err != nil {
			return err
		}
		auth := tpm2.HMAC(tpm2.TPMAlgSHA256, nonce, salt, tpm2.AESEncryption(aes, tpm2.EncryptIn))
		made, err := tpm2.Create{
			ParentHandle: tpm2.AuthHandle{Handle: parent.ObjectHandle, Name: parent.Name, Auth: auth},
			InSensitive: tpm2.TPM2BSensitiveCreate{Sensitive: &tpm2.TPMSSensitiveCreate{
				Data: tpm2.NewTPMUSensitiveCreate(&tpm2.TPM2BSensitiveData{Buffer: secret}),
			}},
			InPublic: tpm2.New2B(tpm2.TPMTPublic{
				Type: tpm2.TPMAlgKeyedHash, NameAlg: tpm2.TPMAlgSHA256, AuthPolicy: tpm2.TPM2BDigest{Buffer: policy},
				ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, NoDA: true},
			}),
		}.Execute(c)
		if err != nil {
			return err
		}
		text, err = json.Marshal(sealed{
			Public: tpm2.Marshal(made.OutPublic), Private: tpm2.Marshal(made.OutPrivate),
			Parent: parent.Name.Buffer, Key: x509.MarshalPKCS1PublicKey(key),
		})
		return err
	})
}

// Unseal gets a secret back.
func (t *TPM) Unseal(text []byte) (secret []byte, err error) {
	if t.why != nil {
		return nil, t.why
	}
	var s sealed
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, err
	}
	public, err := tpm2.Unmarshal[tpm2.TPM2BPublic](s.Public)
	if err != nil {
		return nil, err
	}
	private, err := tpm2.Unmarshal[tpm2.TPM2BPrivate](s.Private)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKCS1PublicKey(s.Key)
	if err != nil {
		return nil, err
	}
	return secret, t.use(func(c transport.TPM, parent *tpm2.CreatePrimaryResponse) error {
		if !bytes.Equal(parent.Name.Buffer, s.Parent) {
			return errors.New("it was sealed by another TPM, or before this one was cleared")
		}
		object, err := tpm2.Load{
			ParentHandle: tpm2.AuthHandle{Handle: parent.ObjectHandle, Name: parent.Name, Auth: tpm2.PasswordAuth(nil)},
			InPrivate:    *private, InPublic: *public,
		}.Execute(c)
		if err != nil {
			return err
		}
		defer flush(c, object.ObjectHandle)
		salt, err := salted(parent)
		if err != nil {
			return err
		}
		for range triesOfPCRs {
			if secret, err = t.unseal(c, object, key, salt); !errors.Is(err, tpm2.TPMRCPCRChanged) {
				break
			}
		}
		if errors.Is(err, tpm2.TPMRCPolicyFail) {
			return errors.Join(errors.New("the keys of Secure Boot, the kernel arguments or the firmware's measurements are others than they were"), err)
		}
		return err
	})
}

// unseal tries it once. A session that is left would take the room of the next.
func (t *TPM) unseal(c transport.TPM, object *tpm2.LoadResponse, key *rsa.PublicKey, salt tpm2.AuthOption) (secret []byte, err error) {
	session, end, err := tpm2.PolicySession(c, tpm2.TPMAlgSHA256, nonce, salt, tpm2.AESEncryption(aes, tpm2.EncryptOut))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := t.satisfy(c, session.Handle(), key); err != nil {
		return nil, err
	}
	out, err := tpm2.Unseal{ItemHandle: tpm2.AuthHandle{Handle: object.ObjectHandle, Name: object.Name, Auth: session}}.Execute(c)
	if err != nil {
		return nil, err
	}
	return out.OutData.Buffer, nil
}

// Usable is why this machine can't seal anything, or nil.
func (t *TPM) Usable() error {
	if t.why != nil {
		return t.why
	}
	values, err := t.Values(FirmwarePCR, SystemPCR)
	if err != nil {
		return err
	}
	for pcr, value := range values {
		if bytes.Equal(value, make([]byte, sha256.Size)) {
			return fmt.Errorf("the firmware measures nothing into PCR %d of the SHA-256 bank: turn that bank on in its menu", pcr)
		}
	}
	return nil
}

// Measured is why PCR 11 isn't that of a system that the PCR key has signed, or nil. It is asked before Close.
func (t *TPM) Measured() error {
	if err := t.Usable(); err != nil {
		return err
	}
	s, err := t.signed(t.key)
	if err != nil {
		return err
	}
	values, err := t.Values(SystemPCR, argumentsPCR, extensionPCR)
	if err != nil {
		return err
	}
	for _, pcr := range []uint{argumentsPCR, extensionPCR} {
		if !bytes.Equal(values[pcr], make([]byte, sha256.Size)) {
			return fmt.Errorf("kernel arguments, credentials or extensions came from outside of the signed system (PCR %d)", pcr)
		}
	}
	p, err := tpm2.NewPolicyCalculator(tpm2.TPMAlgSHA256)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(values[SystemPCR])
	pcr := tpm2.PolicyPCR{Pcrs: selection(SystemPCR), PcrDigest: tpm2.TPM2BDigest{Buffer: sum[:]}}
	if err := pcr.Update(p); err != nil {
		return err
	}
	if hex.EncodeToString(p.Hash().Digest) != s.Policy {
		return errors.New("the system that runs isn't the one that was signed")
	}
	sum = sha256.Sum256(p.Hash().Digest)
	return rsa.VerifyPKCS1v15(t.key, crypto.SHA256, sum[:], s.Signature)
}

// Values are those of some PCRs in the SHA-256 bank.
func (t *TPM) Values(pcrs ...uint) (values map[uint][]byte, err error) {
	return values, t.with(func(c transport.TPM) (err error) {
		values, err = read(c, pcrs...)
		return err
	})
}

// Close has the TPM give no secret back until the next boot.
func (t *TPM) Close() error {
	what := sha256.Sum256([]byte(api.DisksOpen))
	return t.with(func(c transport.TPM) error {
		_, err := tpm2.PCRExtend{
			PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(SystemPCR), Auth: tpm2.PasswordAuth(nil)},
			Digests:   tpm2.TPMLDigestValues{Digests: []tpm2.TPMTHA{{HashAlg: tpm2.TPMAlgSHA256, Digest: what[:]}}},
		}.Execute(c)
		return err
	})
}

// signed is the signature of a PCR key for the running system.
func (t *TPM) signed(key *rsa.PublicKey) (signature, error) {
	sum := sha256.Sum256(x509.MarshalPKCS1PublicKey(key))
	for _, s := range t.signatures {
		if s.Fingerprint == hex.EncodeToString(sum[:]) {
			return s, nil
		}
	}
	return signature{}, errors.New("it was sealed for systems with another PCR key")
}

// satisfy makes the policy of a session that of policyOf.
func (t *TPM) satisfy(c transport.TPM, handle tpm2.TPMISHPolicy, key *rsa.PublicKey) error {
	s, err := t.signed(key)
	if err != nil {
		return err
	}
	approved, err := hex.DecodeString(s.Policy)
	if err != nil {
		return err
	}
	loaded, err := tpm2.LoadExternal{InPublic: tpm2.New2B(publicOf(key)), Hierarchy: tpm2.TPMRHOwner}.Execute(c)
	if err != nil {
		return err
	}
	defer flush(c, loaded.ObjectHandle)
	sum := sha256.Sum256(approved)
	verified, err := tpm2.VerifySignature{
		KeyHandle: loaded.ObjectHandle, Digest: tpm2.TPM2BDigest{Buffer: sum[:]},
		Signature: tpm2.TPMTSignature{SigAlg: tpm2.TPMAlgRSASSA, Signature: tpm2.NewTPMUSignature(tpm2.TPMAlgRSASSA,
			&tpm2.TPMSSignatureRSA{Hash: tpm2.TPMAlgSHA256, Sig: tpm2.TPM2BPublicKeyRSA{Buffer: s.Signature}})},
	}.Execute(c)
	if err != nil {
		return err
	}
	if _, err := (tpm2.PolicyPCR{PolicySession: handle, Pcrs: selection(SystemPCR)}).Execute(c); err != nil {
		return err
	}
	if _, err := (tpm2.PolicyAuthorize{
		PolicySession: handle, ApprovedPolicy: tpm2.TPM2BDigest{Buffer: approved}, KeySign: loaded.Name, CheckTicket: verified.Validation,
	}).Execute(c); err != nil {
		return fmt.Errorf("the running system isn't the one that was signed, or the disks were opened before: %w", err)
	}
	_, err = tpm2.PolicyPCR{PolicySession: handle, Pcrs: selection(FirmwarePCR, argumentsPCR, extensionPCR)}.Execute(c)
	return err
}

// policyOf is the digest of the policy for a value of PCR 7.
func policyOf(key *rsa.PublicKey, firmware []byte) ([]byte, error) {
	public := publicOf(key)
	name, err := tpm2.ObjectName(&public)
	if err != nil {
		return nil, err
	}
	p, err := tpm2.NewPolicyCalculator(tpm2.TPMAlgSHA256)
	if err != nil {
		return nil, err
	}
	values := sha256.Sum256(append(bytes.Clone(firmware), make([]byte, 2*sha256.Size)...))
	authorize := tpm2.PolicyAuthorize{KeySign: *name}
	pcrs := tpm2.PolicyPCR{Pcrs: selection(FirmwarePCR, argumentsPCR, extensionPCR), PcrDigest: tpm2.TPM2BDigest{Buffer: values[:]}}
	err = authorize.Update(p)
	if err == nil {
		err = pcrs.Update(p)
	}
	return p.Hash().Digest, err
}

// publicOf is a PCR key as the TPM takes it.
func publicOf(key *rsa.PublicKey) tpm2.TPMTPublic {
	exponent := uint32(key.E)
	if key.E == 1<<16+1 {
		exponent = 0 // the default
	}
	return tpm2.TPMTPublic{
		Type: tpm2.TPMAlgRSA, NameAlg: tpm2.TPMAlgSHA256,
		ObjectAttributes: tpm2.TPMAObject{SignEncrypt: true, UserWithAuth: true},
		Parameters:       tpm2.NewTPMUPublicParms(tpm2.TPMAlgRSA, &tpm2.TPMSRSAParms{KeyBits: tpm2.TPMKeyBits(key.N.BitLen()), Exponent: exponent}),
		Unique:           tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: new(big.Int).Set(key.N).Bytes()}),
	}
}

// use calls do with the key of the TPM that encrypts what is kept outside of it: the storage root key.
func (t *TPM) use(do func(transport.TPM, *tpm2.CreatePrimaryResponse) error) error {
	return t.with(func(c transport.TPM) error {
		parent, err := tpm2.CreatePrimary{PrimaryHandle: tpm2.TPMRHOwner, InPublic: tpm2.New2B(tpm2.ECCSRKTemplate)}.Execute(c)
		if err != nil {
			return err
		}
		defer flush(c, parent.ObjectHandle)
		return do(c, parent)
	})
}

func (t *TPM) with(do func(transport.TPM) error) error {
	c, err := t.Open()
	if errors.Is(err, os.ErrNotExist) {
		return ErrNone
	}
	if err != nil {
		return err
	}
	return errors.Join(do(c), c.Close())
}

// salted begins a session with a nonce that only the TPM gets: the wires between it and the processor can be read.
func salted(parent *tpm2.CreatePrimaryResponse) (tpm2.AuthOption, error) {
	public, err := parent.OutPublic.Contents()
	if err != nil {
		return nil, err
	}
	return tpm2.Salted(parent.ObjectHandle, *public), nil
}

func read(c transport.TPM, pcrs ...uint) (map[uint][]byte, error) {
	values := map[uint][]byte{}
	for _, pcr := range pcrs {
		out, err := tpm2.PCRRead{PCRSelectionIn: selection(pcr)}.Execute(c)
		if err != nil {
			return nil, err
		}
		if len(out.PCRValues.Digests) != 1 {
			return nil, errors.New("the TPM has no SHA-256 bank: turn it on in the firmware's menu")
		}
		values[pcr] = out.PCRValues.Digests[0].Buffer
	}
	return values, nil
}

func selection(pcrs ...uint) tpm2.TPMLPCRSelection {
	return tpm2.TPMLPCRSelection{PCRSelections: []tpm2.TPMSPCRSelection{{Hash: tpm2.TPMAlgSHA256, PCRSelect: tpm2.PCClientCompatible.PCRs(pcrs...)}}}
}

func flush(c transport.TPM, handle tpm2.TPMHandle) {
	_, _ = tpm2.FlushContext{FlushHandle: handle}.Execute(c) // the kernel flushes the rest when the device is closed
}
