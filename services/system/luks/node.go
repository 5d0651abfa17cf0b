package luks

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
)

// ProductUUID is the file with the machine's UUID (SMBIOS 3.7, section 7.2.1).
const ProductUUID = "/sys/class/dmi/id/product_uuid"

const (
	uuidBytes = 16
	// fewest is how many different bytes, and differences of neighbours, a random UUID has at least: fewer are in less
	// than one of a million.
	fewest = 9
)

// repeated are UUIDs that many machines have, without their hyphens.
var repeated = []string{
	"03000200040005000006000700080009", // boards whose vendor didn't set one
	"4c4c454400002010802080a04f202020", // of Dell, without a serial number
	"00020003000400050006000700080009",
	"12345678123456781234567812345678",
	"12345678123456789012123456789012",
}

// NodePassphrase is the passphrase of a volume on the machine with the UUID in a file, of kind nodeID. It is an error
// if that could be the UUID of another machine.
func NodePassphrase(file, label string) ([]byte, error) {
	text, err := UUID(file)
	if err != nil {
		return nil, err
	}
	return nodePassphrase(text, label)
}

// UUID is that of the machine, as the file has it.
func UUID(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("it needs the machine's UUID: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

func nodePassphrase(text, label string) ([]byte, error) {
	uuid, err := hex.DecodeString(strings.ReplaceAll(strings.ToLower(text), "-", ""))
	if err != nil || len(uuid) != uuidBytes {
		return nil, fmt.Errorf("a nodeID key needs the machine's UUID, which is %q", text)
	}
	if why := guessable(uuid); why != "" {
		return nil, fmt.Errorf("the machine's UUID %s %s: use a static key instead of nodeID", text, why)
	}
	key, err := hkdf.Key(sha256.New, uuid, nil, "garboard disk encryption: "+label, sha256.Size)
	return []byte(hex.EncodeToString(key)), err
}

// guessable says why a UUID isn't random, or "".
func guessable(uuid []byte) string {
	if slices.Contains(repeated, hex.EncodeToString(uuid)) {
		return "is one that vendors repeat"
	}
	values, steps := map[byte]bool{}, map[byte]bool{}
	for i, b := range uuid {
		values[b] = true
		steps[b-uuid[(i+1)%len(uuid)]] = true
	}
	if min(len(values), len(steps)) < fewest {
		return "isn't random"
	}
	return ""
}
