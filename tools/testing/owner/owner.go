// Package owner has the keys of machines' owners, for tests of Secure Boot.
package owner

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/secureboot"
)

// Keys makes those of somebody new, as gbctl does, in a directory.
func Keys(t testing.TB) (dir string, keys *secureboot.Keys) {
	t.Helper()
	dir = t.TempDir()
	files, err := secureboot.Generate(time.Now(), nil)
	for file, content := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, file), content, 0o600))
	}
	if err == nil {
		keys, err = secureboot.Open(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, keys
}

// New returns what signs programs for UEFI, and the db and the name of whose keys these are.
func New(t testing.TB) (sign func(program []byte) []byte, db []byte, name string) {
	t.Helper()
	_, keys := Keys(t)
	return func(program []byte) []byte {
		signed, err := keys.DB.Sign(program)
		if err != nil {
			t.Fatal(err)
		}
		return signed
	}, secureboot.List(keys.DB.Cert), keys.DB.Cert.Subject.CommonName
}
