package luks

import (
	"bytes"
	"strings"
	"testing"
)

// S-168: a machine's key is its own, and a UUID that other machines have makes none.
func TestS168NodePassphrase(t *testing.T) {
	t.Parallel()
	const uuid = "9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3"
	state, err := nodePassphrase(uuid, "STATE")
	if err != nil || len(state) != 64 {
		t.Fatalf("%q, %v", state, err)
	}
	if again, _ := nodePassphrase(strings.ToUpper(uuid), "STATE"); !bytes.Equal(state, again) {
		t.Error("another key at the next boot")
	}
	if other, _ := nodePassphrase(uuid, "EPHEMERAL"); bytes.Equal(state, other) {
		t.Error("two volumes have one key")
	}
	for _, bad := range []string{
		"", "none", "9c3a7e21-5d48-4b0f-8f62", "ffffffff-ffff-ffff-ffff-ffffffffffff", "00000000-0000-0000-0000-000000000000",
		"03000200-0400-0500-0006-000700080009", "00000000-0000-0000-0000-ac1f6b123456", "00010203-0405-0607-0809-0a0b0c0d0e0f",
		"FEFEFEFE-FEFE-FEFE-FEFE-FEFEFEFEFEFE", "12345678-1234-1234-1234-123456789abc", "4c4c4544-0000-2010-8020-80a04f202020",
		"01234567-89ab-cdef-0123-456789abcdef", "Not Settable",
	} {
		if key, err := nodePassphrase(bad, "STATE"); err == nil {
			t.Errorf("%s makes the key %q", bad, key)
		}
	}
	for _, good := range []string{"4c4c4544-0034-5a10-8057-b3c04f4d5732", "e6b1d0a4-93f7-11ee-b9d1-0242ac120002"} {
		if _, err := nodePassphrase(good, "STATE"); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}
