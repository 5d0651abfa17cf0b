// Package signed says whether a machine may take a system: whose it is, which release, and for which machines.
//
// Beside the description of a system (esp.MediumFile) there may be a statement, and the Ed25519 signature of its bytes
// (RFC 8032). The statement is the same description without the place of the system, so it is the same on each medium.
// It has the SHA-256 of the system, and of its parts:
//
//	release.json ── SHA-256 ─▶ the unified kernel image, the kernel, the initramfs, the program that is run before the system is
//	release.sig  ── 64 bytes, of a key that the machine has in its root file system or in its configuration
//
// OpenSSL makes and verifies both (openssl-pkeyutl(1), -rawin): the keys are PEM (RFC 8410), and the signature is
// nothing but that.
package signed

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"

	"github.com/garboard-os/garboard/boot/esp"
	"golang.org/x/mod/semver"
)

const (
	// StatementFile and SignatureFile are beside esp.MediumFile.
	StatementFile = "release.json"
	SignatureFile = "release.sig"
	// KeysFile has the public keys that a system trusts, as PEM. It is in the root file system, so nobody can write it.
	KeysFile = "/usr/share/garboard/release-keys.pem"

	// Arch is that of all machines that systems are made for.
	Arch = "amd64"
	// maxText bounds the description and the statement of a system, which have less than 2 kB.
	maxText = 64 << 10
)

// Policy is what a machine takes.
type Policy struct {
	Keys []ed25519.PublicKey
	// Floor is the highest release that was healthy on this machine; "": none was.
	Floor string
	// Unsigned takes a system whatever its signature is, and Older one below the floor.
	Unsigned, Older bool
}

// Files are what lies beside a system. Statement and Signature may be nil.
type Files struct{ Described, Statement, Signature []byte }

// Read reads them. The description must be there.
func Read(dir fs.FS) (f Files, err error) {
	if f.Described, err = ReadFile(dir, esp.MediumFile, maxText); err != nil {
		return f, err
	}
	for name, to := range map[string]*[]byte{StatementFile: &f.Statement, SignatureFile: &f.Signature} {
		if *to, err = ReadFile(dir, name, maxText); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
	return f, nil
}

// Open opens a regular file only: a link, a FIFO or a device may be in its place.
func Open(dir fs.FS, name string) (fs.File, error) {
	info, err := fs.Lstat(dir, name)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", name)
	}
	if err != nil {
		return nil, err
	}
	return dir.Open(name)
}

// ReadFile reads a regular file that has at most so many bytes.
func ReadFile(dir fs.FS, name string, most int64) ([]byte, error) {
	f, err := Open(dir, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%s has more than %d bytes", name, most)
	}
	return data, err
}

// Judge returns what a machine may believe of a system. If only Policy.Unsigned lets it, unsigned is the reason why
// nobody has vouched for the system.
func (p Policy) Judge(f Files) (m esp.Medium, unsigned string, err error) {
	if err := json.Unmarshal(f.Described, &m); err != nil {
		return m, "", fmt.Errorf("%s: %w", esp.MediumFile, err)
	}
	if m.Offset < 0 || m.Size <= 0 || !fs.ValidPath(m.File) {
		return m, "", fmt.Errorf("%s describes no system", esp.MediumFile)
	}
	vouched, why := p.vouched(f, m)
	switch {
	case why == "":
		vouched.File, vouched.Offset = m.File, m.Offset
		m = vouched
	case !p.Unsigned:
		return m, "", Refused("release " + m.Version + " " + why)
	}
	if m.Arch != "" && m.Arch != runtime.GOARCH {
		return m, "", fmt.Errorf("release %s is for machines with %s, and this one has %s", m.Version, m.Arch, runtime.GOARCH)
	}
	if !p.Older && p.Floor != "" && semver.Compare(m.Version, p.Floor) < 0 {
		return m, "", fmt.Errorf("release %s is older than %s, which was healthy on this machine, and may have defects that were repaired since: "+
			"`gbctl rollback` goes back to a former system in the other slot, and --allow-older takes another one", m.Version, p.Floor)
	}
	return m, why, nil
}

// Refused is the error for a system of which nobody has vouched for. why continues a sentence about the system.
func Refused(why string) error {
	return fmt.Errorf("%s: nothing of it is run. Take one that is signed by a key of this machine, sign it (gbctl image build --key), "+
		"add the key of its maker to machine.install.keys, or set machine.install.unsigned: true", why)
}

// vouched is what was signed, or the reason why that doesn't count.
func (p Policy) vouched(f Files, described esp.Medium) (m esp.Medium, why string) {
	if f.Statement == nil || f.Signature == nil {
		return m, "isn't signed"
	}
	if len(f.Signature) != ed25519.SignatureSize {
		return m, fmt.Sprintf("has a signature of %d bytes, which should have %d", len(f.Signature), ed25519.SignatureSize)
	}
	found := false
	for _, key := range p.Keys {
		found = found || ed25519.Verify(key, f.Statement, f.Signature)
	}
	if !found {
		return m, fmt.Sprintf("isn't signed by one of the %d keys that this machine trusts, or was changed since", len(p.Keys))
	}
	if err := json.Unmarshal(f.Statement, &m); err != nil || m.Size <= 0 || m.Version == "" || m.Arch == "" || m.Program == "" {
		return m, "is signed, but what was signed describes no system"
	}
	if m.SHA256 != described.SHA256 {
		return m, "has the signature of another system"
	}
	return m, ""
}

// Keys reads the public keys of PEM text.
func Keys(text []byte) (keys []ed25519.PublicKey, err error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		public, ok := key.(ed25519.PublicKey)
		if err != nil || !ok {
			return nil, errors.Join(err, fmt.Errorf("a block %s isn't a public Ed25519 key", block.Type))
		}
		keys = append(keys, public)
	}
	return keys, nil
}
