package image

import (
	"crypto"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/image/cache"
)

const (
	// releaseKeyVariable names a file of the environment: the private key that signs the systems of a build, or the public one that they trust, for
	// whoever makes the same bytes again, or signs elsewhere.
	releaseKeyVariable = "GARBOARD_RELEASE_KEY"
	// developmentKey in the cache is the key of all builds without that variable. It is made once.
	developmentKey = "release.key"
)

// ReleaseKey is the key of a build.
type ReleaseKey struct {
	Private crypto.Signer // nil: there is only the public one
	Public  string        // PEM
}

// ReadKey reads the key that the environment names, or else the user's own one.
func ReadKey(store *cache.Store) (k ReleaseKey, err error) {
	path := os.Getenv(releaseKeyVariable)
	if path == "" {
		if path, err = ownKey(store); err != nil {
			return k, err
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return k, err
	}
	public, err := pki.EncodePublicKey(text)
	if err != nil {
		return k, fmt.Errorf("release key %s: %w", path, err)
	}
	k.Public = string(public)
	if key, err := pki.ParsePublicKey(public); err != nil {
		return k, err
	} else if _, ok := key.(ed25519.PublicKey); !ok {
		return k, fmt.Errorf("release key %s: it is no Ed25519 key, as 'gbctl gen release-key' makes it", path)
	}
	k.Private, _ = pki.ParseKey(text) // otherwise it is the public key
	return k, nil
}

// ownKey is the file of the user's key. Of two builds that make it at the same time, both use that of the first.
func ownKey(store *cache.Store) (string, error) {
	path := filepath.Join(store.Dir, developmentKey)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	text, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(store.Dir, 0o755); err != nil {
		return "", err
	}
	temp, err := os.MkdirTemp(store.Dir, ".key-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	made := filepath.Join(temp, developmentKey)
	if err := boot.WriteFile(made, text, 0o600); err != nil {
		return "", err
	}
	if err := os.Link(made, path); !errors.Is(err, fs.ErrExist) {
		return path, err
	}
	return path, nil
}
