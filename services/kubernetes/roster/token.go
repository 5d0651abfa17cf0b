package roster

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"strings"
	"time"
)

// A Token lets machines get their first certificate of the machine API until its end. It is of
// `gbctl token create`, or machine.token of a control plane, to which somebody has given an end.
type Token struct {
	Hash string    `json:"hash"` // of the whole token, SHA-256, hexadecimal
	Ends time.Time `json:"ends"`
}

// TokenID is the part of a token that is no secret.
func TokenID(token string) string {
	id, _, _ := strings.Cut(token, ".")
	return id
}

// NewToken is what is recorded of a token.
func NewToken(token string, ends time.Time) Token {
	hash := sha256.Sum256([]byte(token))
	return Token{Hash: hex.EncodeToString(hash[:]), Ends: ends}
}

// Admits reports whether a machine may join with a token: a recorded one until its end, or that of the
// configuration, which has none unless it is recorded, too.
func (f Facts) Admits(token, configured string) bool {
	want, recorded := f.Tokens[TokenID(token)]
	if !recorded {
		want = NewToken(configured, f.Now.Add(Grace))
	}
	// Hashes have one length, so that comparing them reveals nothing of the token.
	same := subtle.ConstantTimeCompare([]byte(NewToken(token, f.Now).Hash), []byte(want.Hash)) == 1
	return same && f.Now.Before(want.Ends)
}
