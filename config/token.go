package config

import (
	"crypto/rand"
	"encoding/base64"
)

// NewKey32 makes 32 random bytes, as base64.
func NewKey32() Secret {
	key := make([]byte, keyBytes)
	rand.Read(key) // never fails, see crypto/rand
	return Secret(base64.StdEncoding.EncodeToString(key))
}

// IsToken reports whether a text has the form of a token with which nodes join.
func IsToken(text string) bool { return bootstrapToken.MatchString(text) }

// NewToken makes a bootstrap token: 22 characters of 36 kinds, 113 bits.
func NewToken() Secret {
	const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	const id, secret = 6, 16
	var token []byte
	for random := make([]byte, 1); len(token) < id+secret; {
		rand.Read(random)
		// Bytes above the last whole multiple would make some letters more likely.
		if b := int(random[0]); b < 256/len(alphabet)*len(alphabet) {
			token = append(token, alphabet[b%len(alphabet)])
		}
	}
	return Secret(string(token[:id]) + "." + string(token[id:]))
}
