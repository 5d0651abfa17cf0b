package secrets

import (
	"bytes"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
)

const (
	// apiFile is where a worker stores the certificate of its machine API, with the key.
	apiFile = "machine-api.pem"
	// keepAgain is how often to check whether STATE is mounted: a new disk is
	// prepared within seconds.
	keepAgain = 5 * time.Second
)

// certFile is a certificate and its key, in one file so that they always match.
type certFile struct {
	path   string
	ready  func() bool // whether it can be written
	logged string      // why it wasn't used
}

// read returns the pair that an earlier boot has stored, if it is of one of these authorities and valid now.
func (f *certFile) read(v resource.View, now time.Time, authorities ...config.CertKey) config.CertKey {
	data, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return config.CertKey{}
	}
	var pair config.CertKey
	if err == nil {
		pair, err = usable(data, now, authorities)
	}
	if err == nil {
		return pair
	}
	if why := err.Error(); why != f.logged {
		f.logged = why
		v.Log().Info(fmt.Sprintf("the stored certificate of the machine API, %s, isn't used: %s", f.path, why))
	}
	return config.CertKey{}
}

func usable(data []byte, now time.Time, authorities []config.CertKey) (none config.CertKey, err error) {
	if _, err := tls.X509KeyPair(data, data); err != nil {
		return none, err
	}
	block, key := pem.Decode(data)
	pair := config.CertKey{Crt: pem.EncodeToMemory(block), Key: key}
	cert, err := pki.ParseCert(pair.Crt)
	switch {
	case err != nil: // the key comes first: write didn't write this file
		return none, err
	case !signedByAny(cert, authorities...):
		return none, errors.New("it is of another authority")
	case now.After(cert.NotAfter):
		return none, fmt.Errorf("it expired on %s", cert.NotAfter.Format(time.DateOnly))
	}
	return pair, nil
}

// write stores a pair, and returns false if it can't be stored yet. After an error the
// node continues without the file: it requests a certificate again at the next boot.
func (f *certFile) write(v resource.View, pair config.CertKey) bool {
	if !f.ready() {
		return false
	}
	data := slices.Concat([]byte(pair.Crt), []byte(pair.Key))
	if have, err := os.ReadFile(f.path); err == nil && bytes.Equal(have, data) {
		return true
	}
	if err := boot.WriteFile(f.path, data, fileMode); err != nil {
		v.Log().Warn(fmt.Sprintf("store the certificate of the machine API: %v", err))
	}
	return true
}
