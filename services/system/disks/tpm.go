package disks

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/volume"
)

// kindTPM is that of keys in the configuration and in headers.
const kindTPM = "tpm"

// asSigned is the system of a boot that the TPM's keys are for.
const asSigned = "as signed"

// byTPM has the keys that the machine's TPM seals (luks.Sealer). All of the system's disk are unsealed at once, and
// then the TPM is closed until the next boot: before anything of a disk is used, which somebody else may have written,
// and before anybody else can give the machine a configuration.
type byTPM struct {
	*tpm.TPM
	asked  bool              // known and failed have what there is
	closed bool              // no key comes back any more, or it can't be closed
	known  map[string][]byte // passphrases by what they are sealed in
	failed map[string]error  // the others, likewise
	made   map[string]bool   // what of known this boot has sealed
}

// Measured is what the TPM had of this boot when the disks were opened.
type Measured struct {
	Is          string // asSigned, or why not
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
		t.known[string(sealed)], t.made[string(sealed)] = passphrase, true
	}
	return sealed, err
}

// Lasts implements luks.Sealer: the next boot shows what of this one comes back.
func (t *byTPM) Lasts(sealed []byte) bool { return sealed != nil && !t.made[string(sealed)] }

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
	if is := d.Measured().Is; is != asSigned {
		return errors.New(cmp.Or(is, "the TPM wasn't asked yet"))
	}
	return nil
}

// ofEphemeral seals keys of EPHEMERAL. One comes back only where STATE knows it: whoever makes STATE anew, or puts
// another one there, gives this machine a configuration of his own, and must not get the data of before.
type ofEphemeral struct{ *Disks }

// Seal implements luks.Sealer.
func (e ofEphemeral) Seal(ctx context.Context, passphrase []byte) ([]byte, error) {
	sealed, err := e.tpm.Seal(ctx, passphrase)
	if err == nil {
		err = e.keepOwn()
	}
	return sealed, err
}

// Lasts implements luks.Sealer.
func (e ofEphemeral) Lasts(sealed []byte) bool { return e.tpm.Lasts(sealed) }

// Unseal implements luks.Sealer.
func (e ofEphemeral) Unseal(ctx context.Context, sealed []byte) ([]byte, error) {
	passphrase, err := e.tpm.Unseal(ctx, sealed)
	if err != nil || e.tpm.made[string(sealed)] {
		return passphrase, err
	}
	known, err := os.ReadFile(e.ownFile())
	if err != nil || !slices.Contains(strings.Fields(string(known)), fingerprint(passphrase)) {
		return nil, errors.Join(errors.New("STATE isn't the one that was there when this key was made: give the recovery key, or wipe "+
			"EPHEMERAL with gbctl reset --system-labels-to-wipe EPHEMERAL --reboot"), err)
	}
	return passphrase, nil
}

// fingerprint of a passphrase tells nothing about it: it has 260 random bits.
func fingerprint(passphrase []byte) string {
	sum := sha256.Sum256(passphrase)
	return hex.EncodeToString(sum[:])
}

// ownFile has the fingerprints of sealed passphrases of EPHEMERAL (and STATE), a line each.
func (d *Disks) ownFile() string { return filepath.Join(d.o.dirs.State, "ephemeral-keys") }

// keepOwn writes those that this boot has made to STATE, as soon as that is mounted.
func (d *Disks) keepOwn() error {
	if len(d.tpm.made) == 0 || !d.Keeper.Mounted(d.o.dirs.State) {
		return nil
	}
	known, err := os.ReadFile(d.ownFile())
	if boot.IgnoreMissing(err) != nil {
		return err
	}
	lines := strings.Fields(string(known))
	for sealed := range d.tpm.made {
		lines = append(lines, fingerprint(d.tpm.known[sealed]))
	}
	slices.Sort(lines)
	lines = slices.Compact(lines)
	return boot.WriteFile(d.ownFile(), []byte(strings.Join(lines, "\n")+"\n"), 0o600)
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
				if err != nil {
					d.log.Warn(fmt.Sprintf("the next system may not open %s with the TPM, as this one didn't: %v", l.Label, err))
					return nil, nil
				}
				return d.tpm.TPM.Seal(passphrase, public)
			})
	}
	return err
}

// openTPM unseals the keys of a disk, or of none, and closes the TPM. What fails leaves its keys sealed: others open
// the disk, or the machine is locked.
func (d *Disks) openTPM(ctx context.Context, system disk.Disk) {
	defer d.closeTPM() // also after a panic about what is on the disk
	if d.tpm.asked {
		return
	}
	d.tpm.asked = true
	measured := Measured{Is: asSigned}
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
			if d.tpm.known[string(sealed)] != nil || d.tpm.failed[string(sealed)] != nil {
				return
			}
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

// closeTPM is tried again while the node runs: a TPM may come after all others.
func (d *Disks) closeTPM() {
	if d.tpm.closed {
		return
	}
	err := d.tpm.Close()
	d.tpm.closed = !errors.Is(err, tpm.ErrNone)
	if err != nil && d.tpm.closed {
		clear(d.tpm.known)
		d.measured.Store(&Measured{Is: "the TPM can't be closed: " + err.Error()})
		d.log.Error("the TPM's keys aren't used in this boot, as it can't be closed", "err", err)
	}
}

// lateTPM reports whether the firmware has a TPM, as the boot loader's stub has measured the system, and the kernel
// may still find it.
func (d *Disks) lateTPM() bool {
	return !d.tpm.asked && d.mayCome() && errors.Is(d.tpm.Usable(), tpm.ErrNone)
}
