// Package signer signs systems for tests, and says who has made them.
package signer

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"testing"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/image/release"
)

// Key signs the systems of a maker, by name.
func Key(maker string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(maker))
	return ed25519.NewKeyFromSeed(seed[:])
}

// Public is the PEM text of its public key.
func Public(t *testing.T, maker string) []byte {
	t.Helper()
	private, err := pki.EncodeKey(Key(maker))
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.EncodePublicKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return public
}

// Release signs the systems of most tests.
const Release = "the release"

// Signed returns what lies beside an image: its description, whose hash and size it sets, and the signature of its
// maker.
func Signed(t *testing.T, maker string, m esp.Medium, image []byte) map[string][]byte {
	t.Helper()
	sum := sha256.Sum256(image)
	m.Size, m.SHA256 = int64(len(image)), hex.EncodeToString(sum[:])
	files := Unsigned(t, m)
	f, err := release.Sign(Key(maker), m, bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	files[signed.StatementFile], files[signed.SignatureFile] = f.Statement, f.Signature
	return files
}

// Unsigned returns the description only.
func Unsigned(t *testing.T, m esp.Medium) map[string][]byte {
	t.Helper()
	described, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{esp.MediumFile: described}
}
