// Package softtpm has machines with a TPM of swtpm, for tests.
package softtpm

import (
	"crypto/sha256"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/garboard-os/garboard/image/secureboot"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// What a firmware starts, and whose it is.
type (
	Owner   = secureboot.Keys
	Section = secureboot.Section
)

// A Machine has a TPM, which keeps its seeds over restarts.
type Machine struct {
	t       testing.TB
	dir     string
	process *exec.Cmd
}

// New is a machine that is off.
func New(t testing.TB) *Machine {
	t.Helper()
	if _, err := exec.LookPath("swtpm"); err != nil {
		t.Skipf("install Debian's package swtpm: %v", err)
	}
	dir, err := os.MkdirTemp("", "tpm") // the path of a socket has to be short
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{t: t, dir: dir}
	t.Cleanup(func() {
		m.off()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *Machine) off() {
	if m.process != nil {
		_, _ = m.process.Process.Kill(), m.process.Wait()
	}
}

// Open is the way to the TPM.
func (m *Machine) Open() (transport.TPMCloser, error) {
	return linuxudstpm.Open(filepath.Join(m.dir, "socket"))
}

// Boot restarts the machine. Its firmware with these keys starts a system of an owner with these sections, in the order
// in which the stub measures them. It returns the directory of what the stub leaves.
func (m *Machine) Boot(firmware string, owner *Owner, sections ...Section) (left string) {
	m.t.Helper()
	m.Start()
	m.Measure(7, firmware)
	for _, s := range sections {
		m.Measure(11, s.Name+"\x00", string(s.Content))
	}
	left = m.t.TempDir()
	key, err := owner.PolicyKey()
	signature, signErr := owner.PolicySignature(sections)
	if err = errors.Join(err, signErr, os.WriteFile(filepath.Join(left, "tpm2-pcr-public-key.pem"), key, 0o600),
		os.WriteFile(filepath.Join(left, "tpm2-pcr-signature.json"), signature, 0o600)); err != nil {
		m.t.Fatal(err)
	}
	return left
}

// Start restarts the machine, and nothing is measured.
func (m *Machine) Start() {
	m.t.Helper()
	m.off()
	socket := filepath.Join(m.dir, "socket")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		m.t.Fatal(err)
	}
	m.process = exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir="+m.dir, "--flags", "not-need-init,startup-clear",
		"--server", "type=unixio,path="+socket)
	if err := m.process.Start(); err != nil {
		m.t.Fatal(err)
	}
	eventually.That(m.t, 20*time.Second, "the TPM answers", func() error {
		c, err := m.Open()
		if err != nil {
			return err
		}
		_, err = tpm2.GetRandom{BytesRequested: 1}.Execute(c)
		return errors.Join(err, c.Close())
	})
}

// Measure extends a PCR.
func (m *Machine) Measure(pcr uint, all ...string) {
	m.t.Helper()
	c, err := m.Open()
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close()
	for _, one := range all {
		sum := sha256.Sum256([]byte(one))
		_, err := tpm2.PCRExtend{
			PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(pcr), Auth: tpm2.PasswordAuth(nil)},
			Digests:   tpm2.TPMLDigestValues{Digests: []tpm2.TPMTHA{{HashAlg: tpm2.TPMAlgSHA256, Digest: sum[:]}}},
		}.Execute(c)
		if err != nil {
			m.t.Fatal(err)
		}
	}
}
