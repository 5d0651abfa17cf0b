package disks

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/volume"
)

// kindTPM is that of keys in the configuration and in headers.
const kindTPM = "tpm"

// byTPM has the keys that the machine's TPM seals (luks.Sealer). All of the system's disk are unsealed at once, and
// then the TPM is closed until the next boot: before anything of a disk is used, which somebody else may have written,
// and before anybody else can give the machine a configuration.
type byTPM struct {
	*tpm.TPM
	usable func() error      // why this machine can't seal keys, or nil: it doesn't change during a boot
	closed bool              // no key comes back any more
	known  map[string][]byte // passphrases by what they are sealed in
	failed map[string]error  // the others, likewise
}

// Measured is what the TPM had of this boot when the disks were opened.
type Measured struct {
	Is          string // as signed, or why not
	PCR7, PCR11 string // hexadecimal; "": there is no TPM
}

// Measured is zero in a container, and before the disks are opened.
func (d *Disks) Measured() Measured {
	if m := d.measured.Load(); m != nil {
		return *m
	}
	return Measured{}
}

// Quote is a proof of what this machine runs, and PCR 11 before the disks were opened.
func (d *Disks) Quote(nonce []byte) (q tpm.Quote, system []byte, err error) {
	if d.o.Mode == boot.Container {
		return q, nil, errors.New("a node in a container has no TPM")
	}
	q, err = d.tpm.Quote(nonce)
	if err == nil {
		system, err = hex.DecodeString(d.Measured().PCR11)
	}
	return q, system, err
}

// Seal implements luks.Sealer.
func (t *byTPM) Seal(_ context.Context, passphrase []byte) ([]byte, error) {
	sealed, err := t.TPM.Seal(passphrase, nil)
	if err == nil {
		t.known[string(sealed)] = passphrase
	}
	return sealed, err
}

// Unseal implements luks.Sealer.
func (t *byTPM) Unseal(_ context.Context, sealed []byte) ([]byte, error) {
	if passphrase := t.known[string(sealed)]; passphrase != nil {
		return passphrase, nil
	}
	return nil, cmp.Or(t.failed[string(sealed)], errors.New("the TPM gives it back at the start of the machine only: restart it"))
}

// usableTPM is an error on a machine whose TPM would give the keys to any system.
func (d *Disks) usableTPM() error {
	if state := esp.SecureBoot(d.Firmware); state != esp.SecureOn {
		return fmt.Errorf("it needs Secure Boot, which is %q: docs/secure-boot.md", state)
	}
	return d.tpm.Usable()
}

// SealFor has the TPM give the keys to systems with another PCR key, too, in PEM: those of an upgrade. Of keys that are
// neither theirs nor those of the running system, which may come back, the headers have nothing any more.
func (d *Disks) SealFor(ctx context.Context, key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	system := d.System()
	if key == "" || system == nil {
		return nil
	}
	public, err := tpm.PolicyKey([]byte(key))
	for _, l := range d.layers {
		device, failed := volume.Partition(ctx, system.Path, l.Label)
		if err = errors.Join(err, failed); err != nil {
			return err
		}
		err = l.SealAgain(ctx, device, kindTPM,
			func(sealed []byte) bool { return d.tpm.For(sealed, public) },
			func(sealed []byte) bool { return d.tpm.For(sealed, nil) },
			func(sealed []byte) ([]byte, error) {
				passphrase, err := d.tpm.Unseal(ctx, sealed)
				if err == nil {
					sealed, err = d.tpm.TPM.Seal(passphrase, public)
				}
				return sealed, err
			})
	}
	return err
}

// openTPM unseals the keys of a disk, or of none, and closes the TPM. What fails leaves its keys sealed: others open
// the disk, or the machine is locked.
func (d *Disks) openTPM(ctx context.Context, system disk.Disk) {
	if d.tpm.closed {
		return
	}
	d.tpm.closed = true
	defer func() { // also after a panic about what is on the disk
		if err := d.tpm.Close(); err != nil && !errors.Is(err, tpm.ErrNone) {
			clear(d.tpm.known)
			d.log.Error("the TPM's keys aren't used in this boot, as it can't be closed", "err", err)
		}
	}()
	measured := Measured{Is: "as signed"}
	if err := d.tpm.Measured(); err != nil {
		measured.Is = err.Error()
	}
	if values, err := d.tpm.Values(tpm.FirmwarePCR, tpm.SystemPCR); err == nil {
		measured.PCR7, measured.PCR11 = hex.EncodeToString(values[tpm.FirmwarePCR]), hex.EncodeToString(values[tpm.SystemPCR])
	}
	d.measured.Store(&measured)
	for _, l := range d.layers {
		device, err := volume.Partition(ctx, system.Path, l.Label)
		if err != nil {
			continue // there is no system, or half of one
		}
		err = l.Sealed(ctx, device, kindTPM, func(sealed []byte) {
			if passphrase, err := d.tpm.TPM.Unseal(sealed); err == nil {
				d.tpm.known[string(sealed)] = passphrase
			} else {
				d.tpm.failed[string(sealed)] = err
			}
		})
		if err != nil {
			d.log.Warn(fmt.Sprintf("the TPM's keys of %s aren't read: %v", l.Label, err))
		}
	}
}
