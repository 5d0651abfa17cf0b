// Package release signs systems: the running system verifies what it is to install (boot/signed).
package release

import (
	"crypto"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
)

// Sign makes the statement of a system, and signs that. The system is read for the hashes of its parts.
func Sign(key crypto.Signer, m esp.Medium, system io.ReaderAt) (f signed.Files, err error) {
	program, err := esp.Program(system, m.Size)
	if err != nil {
		return f, err
	}
	defer program.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, program); err != nil {
		return f, err
	}
	m.Arch, m.Program, m.File, m.Offset = signed.Arch, hex.EncodeToString(sum.Sum(nil)), "", 0
	if f.Statement, err = json.MarshalIndent(m, "", "  "); err != nil {
		return f, err
	}
	f.Signature, err = key.Sign(nil, f.Statement, crypto.Hash(0)) // the same for the same bytes (RFC 8032)
	return f, err
}
