package apid

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
)

// The directory of the gate. state.json is written last and names the digest of
// the others: so half a change is never taken for a whole one.
const (
	stateName  = "state.json"
	bundleName = "ca.crt" // authorities of clients; several during a rotation
	certName   = "server.crt"
	keyName    = "server.key"
)

const (
	// modeClosed is beside api.ModeNormal and api.ModeMaintenance: nobody may come
	// in. The node has a configuration, but its certificate isn't made yet.
	modeClosed = "closed"
	// maxFile bounds what is read of each file: PID 1 writes them, yet a hundred
	// authorities fit.
	maxFile = 256 << 10
)

// stateFile is state.json.
type stateFile struct {
	Mode string `json:"mode"`
	// PinnedCA, in maintenance mode, is the SHA-256 of a certificate that clients
	// must show: their own, or their authority's. Hexadecimal; empty: none.
	PinnedCA string `json:"pinnedCA,omitempty"`
	Digest   string `json:"digest"`
}

// knowledge is what PID 1 tells the gate, in files.
type knowledge struct {
	mode     string
	pinnedCA string
	bundle   []byte
	cert     []byte
	key      []byte
}

func (k knowledge) files() map[string][]byte {
	return map[string][]byte{bundleName: k.bundle, certName: k.cert, keyName: k.key}
}

func (k knowledge) digest() string {
	h := sha256.New()
	for _, data := range [][]byte{k.bundle, k.cert, k.key} {
		fmt.Fprintf(h, "%d ", len(data))
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// write puts k into dir, for the user of the gate alone.
func (k knowledge) write(dir string, uid int) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// Lchown, here and below: the gate owns the directory, and where it had put a
	// link, another file would be given to it.
	if err := os.Lchown(dir, uid, uid); err != nil {
		return err
	}
	put := func(name string, data []byte) error {
		path := filepath.Join(dir, name)
		if err := boot.WriteFile(path, data, 0o600); err != nil {
			return err
		}
		// In between the gate can't read it, and tries again in a second.
		return os.Lchown(path, uid, uid)
	}
	for name, data := range k.files() {
		if err := put(name, data); err != nil {
			return err
		}
	}
	text, err := json.Marshal(stateFile{Mode: k.mode, PinnedCA: k.pinnedCA, Digest: k.digest()})
	if err != nil {
		return err
	}
	return put(stateName, text)
}

// read is the other side of write.
func read(dir string) (k knowledge, err error) {
	text, err := readFile(filepath.Join(dir, stateName))
	if err != nil {
		return k, err
	}
	var f stateFile
	if err := json.Unmarshal(text, &f); err != nil {
		return k, fmt.Errorf("read %s: %w", stateName, err)
	}
	k = knowledge{mode: f.Mode, pinnedCA: f.PinnedCA}
	for name, to := range map[string]*[]byte{bundleName: &k.bundle, certName: &k.cert, keyName: &k.key} {
		if *to, err = readFile(filepath.Join(dir, name)); err != nil {
			return k, err
		}
	}
	if k.digest() != f.Digest {
		return k, fmt.Errorf("read %s: its files are not those that it was written for", stateName)
	}
	return k, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("read %s: more than %d bytes", path, maxFile)
	}
	return data, nil
}

// state is what the gate goes by. It never changes: another one takes its place.
type state struct {
	mode    string
	pinned  string         // SHA-256 in lower-case hexadecimal; "": none
	trusted *x509.CertPool // normal mode
	tls     *tls.Config    // nil when closed
}

// newState makes sense of k.
func newState(k knowledge) (*state, error) {
	s := &state{mode: k.mode, pinned: k.pinnedCA}
	switch k.mode {
	case modeClosed:
		return s, nil
	case api.ModeNormal:
		pool, err := authorities(k.bundle)
		if err != nil {
			return nil, err
		}
		s.trusted = pool
	case api.ModeMaintenance:
	default:
		return nil, fmt.Errorf("mode %q: there is no such mode", k.mode)
	}
	cert, err := tls.X509KeyPair(k.cert, k.key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the API: %w", err)
	}
	s.tls = s.config(cert)
	return s, nil
}

func (s *state) config(cert tls.Certificate) *tls.Config {
	c := &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{cert},
		NextProtos:   []string{"h2", "http/1.1"},
		// A ticket would bring back a client whose authority is gone.
		SessionTicketsDisabled: true,
	}
	if s.knowsCallers() {
		c.ClientAuth = tls.RequireAnyClientCert
		c.VerifyConnection = s.admit
	}
	return c
}

// knowsCallers tells whether clients must show a certificate.
func (s *state) knowsCallers() bool { return s.mode == api.ModeNormal || s.pinned != "" }

// authorities are all certificates of a bundle.
func authorities(bundle []byte) (*x509.CertPool, error) {
	pool, found := x509.NewCertPool(), 0
	for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("authority of clients: %w", err)
		}
		pool.AddCert(cert)
		found++
	}
	if found == 0 {
		return nil, errors.New("authority of clients: none is given")
	}
	return pool, nil
}
