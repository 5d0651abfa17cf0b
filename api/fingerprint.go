package api

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// Fingerprint is the SHA-256 of a certificate's DER, in hexadecimal.
func Fingerprint(der []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(der))
}

// ShownFingerprint is a Fingerprint in the way in which tools print one, for people
// to compare: AB:CD:…
func ShownFingerprint(der []byte) string {
	return strings.ReplaceAll(fmt.Sprintf("% X", sha256.Sum256(der)), " ", ":")
}

// ParseFingerprint makes a Fingerprint of the ways in which tools write one. The
// empty text isn't one: what a script has put together of an empty variable must
// not be believed for that.
func ParseFingerprint(text string) (string, error) {
	plain := strings.ToLower(strings.TrimSpace(text))
	plain = strings.TrimPrefix(plain, "sha256:")
	plain = strings.ReplaceAll(plain, ":", "")
	if raw, err := hex.DecodeString(plain); err != nil || len(raw) != sha256.Size {
		return "", fmt.Errorf("fingerprint %q must be SHA-256 in hexadecimal: 64 digits, with or without colons", text)
	}
	return plain, nil
}
