package image

import (
	"context"
	"crypto"
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config/pki"
)

const (
	// ReleaseKeyVariable names a file of the environment: the private key that signs the systems of a build, or the
	// public one that they trust, for whoever makes the same bytes again, or signs elsewhere.
	ReleaseKeyVariable = "GARBOARD_RELEASE_KEY"
	// stepReleaseKey makes the key of all builds without that variable: there is one in a cache.
	stepReleaseKey = "release-key"
)

// releaseKey reads the key that the environment names, or else the user's own one. private is nil if there is only the
// public one, which is PEM.
func (b *builder) releaseKey(ctx context.Context) (private crypto.Signer, public string, err error) {
	path := os.Getenv(ReleaseKeyVariable)
	if path == "" {
		dir, err := b.store.Build(ctx, stepReleaseKey, nil, func(_ context.Context, dir string) error {
			text, err := pki.NewKey(pki.Ed25519)
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "release.key"), text, 0o600)
		})
		if err != nil {
			return nil, "", err
		}
		path = filepath.Join(dir, "release.key")
	}
	return ReadReleaseKey(path)
}

// ReadReleaseKey reads the file that the variable names.
func ReadReleaseKey(path string) (private crypto.Signer, public string, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, "", err
	}
	half, err := pki.EncodePublicKey(text)
	if err == nil {
		_, err = signed.Keys(half)
	}
	if err != nil {
		return nil, "", fmt.Errorf("release key %s: %w", path, err)
	}
	private, _ = pki.ParseKey(text) // otherwise it is the public key
	return private, string(half), nil
}
