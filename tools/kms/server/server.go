// Package server is a key server: it seals passphrases for machines, and gives them back to those of its list. It
// keeps none of them. docs/kms.md has the protocol and how to run it.
package server

import (
	"cmp"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hpke"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/api/kms"
)

const (
	maxRequest = 16 << 10
	timeout    = 10 * time.Second
	// maxPassphrase is far more than a machine has.
	maxPassphrase = 512
)

// Server answers machines.
type Server struct {
	Key  []byte // 32 bytes: with it and the disk, one has the passphrase
	List string // the file with the machines
	Log  *slog.Logger

	mu sync.Mutex // guards the file
}

// refused is an error that a machine gets to know.
type refused struct {
	status int
	error
}

func refuse(status int, format string, args ...any) error {
	return refused{status, fmt.Errorf(format, args...)}
}

// HTTP is the server with a certificate.
func (s *Server) HTTP(cert tls.Certificate) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("POST "+kms.SealPath, handle(s, s.seal))
	mux.Handle("POST "+kms.UnsealPath, handle(s, s.unseal))
	return &http.Server{
		Handler: mux, ReadTimeout: timeout, WriteTimeout: timeout, IdleTimeout: timeout, MaxHeaderBytes: maxRequest,
		// The certificate of a machine is its own work: what counts is that it has the key, and which one that is.
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAnyClientCert},
		ErrorLog:  slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn),
	}
}

// handle is the HTTP of a request.
func handle[Q any](s *Server, answer func(peer *x509.Certificate, request Q) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer := r.TLS.PeerCertificates[0]
		var request Q
		var out any
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&request)
		if err != nil {
			err = refuse(http.StatusBadRequest, "the request: %w", err)
		} else {
			out, err = answer(peer, request)
		}
		status := http.StatusOK
		if err != nil {
			no, _ := errors.AsType[refused](err)
			status = cmp.Or(no.status, http.StatusInternalServerError)
			out = kms.Refusal{Error: err.Error()}
		}
		s.Log.Info(r.URL.Path, "machine", fingerprint(peer), "from", r.RemoteAddr, "status", status, "err", err)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(out) // the machine asks again
	})
}

func (s *Server) seal(peer *x509.Certificate, r kms.SealRequest) (any, error) {
	if len(r.Passphrase) == 0 || len(r.Passphrase) > maxPassphrase {
		return nil, refuse(http.StatusBadRequest, "a passphrase has 1 to %d bytes", maxPassphrase)
	}
	if err := s.admit(r.UUID, fingerprint(peer), true); err != nil {
		return nil, err
	}
	box, err := s.box()
	if err != nil {
		return nil, err
	}
	return kms.SealAnswer{Sealed: box.Seal(nil, nil, r.Passphrase, owner(peer))}, nil
}

func (s *Server) unseal(peer *x509.Certificate, r kms.UnsealRequest) (any, error) {
	if len(r.Nonce) != kms.NonceBytes {
		return nil, refuse(http.StatusBadRequest, "a nonce has %d bytes", kms.NonceBytes)
	}
	if err := s.admit(r.UUID, fingerprint(peer), false); err != nil {
		return nil, err
	}
	box, err := s.box()
	if err != nil {
		return nil, err
	}
	passphrase, err := box.Open(nil, nil, r.Sealed, owner(peer))
	if err != nil {
		return nil, refuse(http.StatusUnprocessableEntity, "this server hasn't sealed that for this machine")
	}
	to, err := hpke.DHKEM(ecdh.X25519()).NewPublicKey(r.PublicKey)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "the public key: %w", err)
	}
	answer, err := hpke.Seal(to, hpke.HKDFSHA256(), hpke.AES256GCM(), r.Info(), passphrase)
	if err != nil {
		return nil, err
	}
	return kms.UnsealAnswer{Passphrase: answer}, nil
}

// box seals with the server's key. It makes a nonce for each passphrase.
func (s *Server) box() (cipher.AEAD, error) {
	block, err := aes.NewCipher(s.Key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// fingerprint is by what the list knows a machine: the SHA-256 of its public key.
func fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// owner binds what is sealed to its machine.
func owner(peer *x509.Certificate) []byte { return []byte("garboard kms v1 " + fingerprint(peer)) }

// admit is nil for a machine of the list. One that seals for the first time is bound to its key, so that no other one
// takes its place.
func (s *Server) admit(uuid, key string, first bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := readList(s.List)
	if err != nil {
		return err
	}
	free := -1
	for i, line := range all {
		switch id, bound := parse(line); {
		case !strings.EqualFold(id, uuid) || id == "":
		case bound == key:
			return nil
		case bound == "" && first:
			free = i
		}
	}
	if free < 0 {
		return refuse(http.StatusForbidden, "machine %q with the key %s isn't in its list", uuid, key)
	}
	id, _ := parse(all[free])
	all[free] = strings.Replace(all[free], id, id+" "+key, 1)
	return writeList(s.List, all)
}
