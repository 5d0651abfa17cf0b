// Package kms is the protocol between a machine and a key server, which seals the passphrases of the machine's disks
// and gives them back to nobody else. docs/kms.md has it for those who write a server; tools/kms is one.
package kms

import "slices"

// Paths of the requests, all of them POST, with JSON in both directions. Bytes are base64 there.
const (
	SealPath   = "/v1/seal"
	UnsealPath = "/v1/unseal"
)

// NonceBytes is the length of a nonce.
const NonceBytes = 32

// SealRequest asks for what gives the passphrase back later.
type SealRequest struct {
	UUID       string `json:"uuid"` // of the machine
	Passphrase []byte `json:"passphrase"`
}

// SealAnswer has it. Only the server reads it.
type SealAnswer struct {
	Sealed []byte `json:"sealed"`
}

// UnsealRequest asks for the passphrase, encrypted to a key that is used once.
type UnsealRequest struct {
	UUID      string `json:"uuid"`
	Sealed    []byte `json:"sealed"`
	Nonce     []byte `json:"nonce"`
	PublicKey []byte `json:"publicKey"` // X25519
}

// UnsealAnswer has it so.
type UnsealAnswer struct {
	Passphrase []byte `json:"passphrase"`
}

// Refusal is the answer with any other status than 200.
type Refusal struct {
	Error string `json:"error"`
}

// Info binds an answer to its request: it is the info of HPKE.
func (r UnsealRequest) Info() []byte {
	return slices.Concat([]byte("garboard kms v1 unseal"), r.Nonce, r.Sealed)
}
