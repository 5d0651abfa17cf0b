package config

import (
	"regexp"
	"strings"
)

// hiddenPart stands for a part of a text that is secret.
const hiddenPart = "xxxxx"

// Secrets in texts that have no schema: lines of logs and of the kernel, command lines,
// values of the configuration. The first group stays.
var secretParts = []*regexp.Regexp{
	// What stands before the host in a URL: a password, or a token alone.
	regexp.MustCompile(`(://(?:[^/\s:@]*:)?)[^/\s@]+@`),
	// A value whose name suggests a secret: an option, a variable, a part of a query.
	regexp.MustCompile(`(?i)([\w.-]*(?:token|pass|passw(?:or)?d|passphrase|credentials?|api_?-?key|private_?-?key|[_.-]secret|[_.-]key|signature|[?&]sig|[?&]key|auth)\\?["']?=\\?["']?)[^\s"'\\&;,=][^\s"'\\&;,]*`),
	// The place of the configuration: its query, or the whole document.
	regexp.MustCompile(`(garboard\.config=(?:data:|[^\s?]*\?))[^\s"]+`),
}

// RedactText is a text without the secrets that its form shows: credentials in URLs, values
// with names such as password, private keys.
func RedactText(text string) string {
	if privatePEM.MatchString(text) {
		return redacted
	}
	if !strings.ContainsAny(text, "@=") {
		return text // as most texts
	}
	for i, secret := range secretParts {
		with := "${1}" + hiddenPart
		if i == 0 {
			with += "@"
		}
		text = secret.ReplaceAllString(text, with)
	}
	return text
}
