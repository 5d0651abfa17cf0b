package api

import (
	"strings"
	"testing"
)

func TestFingerprints(t *testing.T) {
	t.Parallel()
	der := []byte("x")
	plain, shown := Fingerprint(der), ShownFingerprint(der)
	for _, text := range []string{plain, strings.ToUpper(plain), shown, "sha256:" + plain, "SHA256:" + shown} {
		if got, err := ParseFingerprint(text); err != nil || got != plain {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", " ", ":", "sha256:", "0a", "x" + plain[1:], plain + "00"} {
		if _, err := ParseFingerprint(text); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}
