package config

import "testing"

// A key of a server opens a partition in any slot, as long as it is the same server.
func TestKeysThatOpenTheSame(t *testing.T) {
	t.Parallel()
	server := func(host, ca string) EncryptionKey {
		k := EncryptionKey{KMS: &EncryptionKMS{CA: PEM(ca)}}
		k.KMS.Endpoint.Scheme, k.KMS.Endpoint.Host = "https", host
		return k
	}
	nodeID, static := EncryptionKey{NodeID: &EncryptionNodeID{}}, EncryptionKey{Static: &EncryptionStatic{Passphrase: "a"}}
	all := []EncryptionKey{nodeID, static, {TPM: &EncryptionTPM{}}, server("a", "x"), server("b", "x")}
	for i, a := range all {
		for j, b := range all {
			if a.same(b) != (i == j) {
				t.Errorf("%d and %d: %v", i, j, a.same(b))
			}
		}
	}
	if !server("a", "x").same(server("a", "y")) {
		t.Error("another authority of the same server is another key")
	}
}
