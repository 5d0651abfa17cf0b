package slots

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/install"
	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"
)

// Source is a system that can be written to a slot.
type Source struct {
	esp.Medium
	Label string `json:"label,omitempty"` // of the medium
	Image string `json:"image,omitempty"` // where it is instead
	// Replaced is true if the image has a kernel that isn't in its system, and that the machine is to have.
	Replaced bool `json:"replaced,omitempty"`
	// Unsigned is why nobody has vouched for it; the configuration takes it nevertheless.
	Unsigned string `json:"unsigned,omitempty"`
}

func (src Source) String() string {
	text := fmt.Sprintf("Garboard %s %s", src.Version, src.where())
	if src.Unsigned != "" {
		text += ", which " + src.Unsigned + " and is taken because of machine.install.unsigned"
	}
	return text
}

func (src Source) where() string {
	if src.Image != "" {
		return "in the image " + src.Image
	}
	return "on the medium " + src.Label
}

// ErrNoMedium is the error of Medium if no medium with a system is there.
var ErrNoMedium = errors.New("no medium with a system of Garboard is in this machine: insert a CD or a USB stick with one, or name an image (--image)")

// Medium finds the system on a medium. older takes one that is older than a release that was healthy here.
func (s *Slots) Medium(ctx context.Context, older bool) (src Source, err error) {
	for _, label := range []string{boot.MediumLabel, boot.ISOLabel} {
		src, err = s.describe(ctx, Source{Label: label}, older)
		if !errors.Is(err, boot.ErrNone) {
			return src, err
		}
	}
	return src, ErrNoMedium
}

// Pull fetches an installer image, and finds the system in it.
func (s *Slots) Pull(ctx context.Context, image string, older bool, report func(done, of int64)) (src Source, err error) {
	if err := s.o.Images.Fetch(ctx, image, report); err != nil {
		return src, err
	}
	src, err = s.describe(ctx, Source{Image: image}, older)
	if errors.Is(err, boot.ErrNone) {
		err = fmt.Errorf("%s is no installer image: it has no /%s/%s", image, esp.InstallDir, esp.MediumFile)
	}
	return src, err
}

// describe reads what is said of the system there, and refuses one that this machine doesn't trust.
func (s *Slots) describe(ctx context.Context, src Source, older bool) (Source, error) {
	policy, err := s.policy(older)
	if err != nil {
		return src, err
	}
	err = s.files(ctx, src, func(files fs.FS) error {
		said, err := signed.Read(files)
		if errors.Is(err, fs.ErrNotExist) {
			return boot.ErrNone // a volume that has only a configuration
		}
		if err != nil {
			return src.damaged(ctx, err)
		}
		if src.Medium, src.Unsigned, err = policy.Judge(said); err != nil {
			return fmt.Errorf("the system %s: %w", src.where(), err)
		}
		if s.Running() != "" && semver.Compare(boot.Version, src.From) < 0 {
			return fmt.Errorf("release %s upgrades machines from release %s on, and this one runs %s: upgrade to that release first", src.Version, src.From, boot.Version)
		}
		if src.Image == "" {
			return nil
		}
		return src.replace(ctx, files, policy.Unsigned)
	})
	return src, err
}

// policy is what this machine takes.
func (s *Slots) policy(older bool) (p signed.Policy, err error) {
	p.Older = older
	if cfg, err := configuration.Config(s.o.Store); err == nil {
		p.Unsigned = cfg.Machine.Install.Unsigned
		for _, line := range cfg.Machine.Install.Keys {
			key, err := pki.ReleaseKey(line)
			if err != nil {
				return p, fmt.Errorf("machine.install.keys: %w", err)
			}
			p.Keys = append(p.Keys, key)
		}
	}
	text, err := os.ReadFile(s.o.keys)
	if err := boot.IgnoreMissing(err); err != nil {
		return p, err
	}
	own, err := signed.Keys(text)
	if err != nil {
		return p, fmt.Errorf("%s: %w", s.o.keys, err)
	}
	p.Keys = append(p.Keys, own...)
	if s.Running() != "" { // others may have no disk yet
		err = s.meta(func(c meta.Change) (err error) { p.Floor, err = boot.FloorKey.In(c); return err })
	}
	return p, err
}

// replace finds out whether an installer image has a kernel that is to replace that of its system. The system is then
// another one.
func (src *Source) replace(ctx context.Context, files fs.FS, unsigned bool) error {
	kernel, err := signed.ReadFile(files, esp.KernelFile, maxKernel)
	if err != nil {
		return boot.IgnoreMissing(err) // earlier releases have none
	}
	release, err := esp.Release(kernel)
	if err != nil {
		return fmt.Errorf("%s in the image %s: %w", esp.KernelFile, src.Image, err)
	}
	if src.Modules != "" && src.Modules != release {
		return fmt.Errorf("the image %s has Linux %s, and modules for Linux %s: build it with the modules of its kernel", src.Image, release, src.Modules)
	}
	sum := sha256.Sum256(kernel)
	if src.Kernel == "" || hex.EncodeToString(sum[:]) == src.Kernel {
		return nil
	}
	why := "isn't signed with the kernel that is to replace its own"
	if !unsigned {
		return signed.Refused("the system " + src.where() + " " + why)
	}
	src.Unsigned = cmp.Or(src.Unsigned, why)
	return src.open(files, func(system *io.SectionReader) error {
		if err := install.Check(ctx, src.SHA256, system, io.Discard, nil); err != nil {
			return src.damaged(ctx, err)
		}
		changed, err := esp.ReplaceKernel(system, system.Size(), kernel)
		if err != nil {
			return err
		}
		sum := sha256.New()
		if src.Size, err = io.Copy(sum, changed); err == nil {
			src.SHA256, src.Replaced = hex.EncodeToString(sum.Sum(nil)), true
		}
		return err
	})
}

// files calls use with the directory that has the system.
func (s *Slots) files(ctx context.Context, src Source, use func(fs.FS) error) error {
	if src.Image == "" {
		volume := s.o.Disks.Volume
		if s.Running() != "" || s.o.Disks.Known() { // pods may run, or have run, and have disks of their own
			volume = s.o.Disks.Media
		}
		return volume(ctx, src.Label, use)
	}
	return s.o.Images.Files(ctx, src.Image, func(root fs.FS) error {
		dir, err := fs.Sub(root, esp.InstallDir)
		if err != nil {
			return err
		}
		return use(dir)
	})
}

// damaged is what an error means, unless ctx has ended while the system was read.
func (src Source) damaged(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("the system %s is damaged: make it again (gbctl media build): %w", src.where(), err)
}

// maxKernel is several times the size of Debian's, in bytes. It is read into memory.
const maxKernel = 64 << 20

// open calls use with the system as it lies there.
func (src Source) open(files fs.FS, use func(system *io.SectionReader) error) error {
	f, err := signed.Open(files, src.File)
	if errors.Is(err, fs.ErrNotExist) && src.Image == "" {
		return boot.ErrNone // another volume with the label has it
	}
	if err != nil {
		return err
	}
	defer f.Close()
	at, ok := f.(io.ReaderAt)
	if !ok {
		return fmt.Errorf("%s can't be read from the middle", src.File)
	}
	size := src.Size
	if src.Replaced { // in an installer image, the system is a file of its own
		info, err := f.Stat()
		if err != nil {
			return err
		}
		size = info.Size()
	}
	return use(io.NewSectionReader(at, src.Offset, size))
}

// read calls use with the bytes of the system.
func (s *Slots) read(ctx context.Context, src Source, use func(system *io.SectionReader) error) error {
	err := s.files(ctx, src, func(files fs.FS) error {
		return src.open(files, func(system *io.SectionReader) error {
			if !src.Replaced {
				return use(system)
			}
			kernel, err := signed.ReadFile(files, esp.KernelFile, maxKernel)
			if err != nil {
				return err
			}
			if system, err = esp.ReplaceKernel(system, system.Size(), kernel); err != nil {
				return err
			}
			return use(system)
		})
	})
	if errors.Is(err, boot.ErrNone) {
		return fmt.Errorf("the medium %s isn't in the machine any more", src.Label)
	}
	return err
}

// Sound refuses a medium that this machine is to be installed from, and whose system isn't as it was made.
func (s *Slots) Sound(ctx context.Context) error {
	if s.Running() != "" || s.image() != "" { // an image is pulled to the disk
		return nil
	}
	src, err := s.Medium(ctx, false)
	if errors.Is(err, ErrNoMedium) { // nothing is installed
		return nil
	}
	if err == nil {
		err = s.whole(ctx, src, nil)
	}
	return err
}

// Verify reads the whole system, and refuses one that isn't as it was made, or that its slot has no room for. The slot
// keeps what it has.
func (s *Slots) Verify(ctx context.Context, src Source, report func(done, of int64)) error {
	if err := s.whole(ctx, src, report); err != nil {
		return err
	}
	return s.room(ctx, src)
}

// whole reads a system, and compares its checksum.
func (s *Slots) whole(ctx context.Context, src Source, report func(done, of int64)) error {
	return s.read(ctx, src, func(system *io.SectionReader) error {
		err := install.Check(ctx, src.SHA256, system, io.Discard, func(done int64) {
			if report != nil {
				report(done, src.Size)
			}
		})
		if err != nil {
			return src.damaged(ctx, err)
		}
		image, err := esp.ReadImage(system, src.Size)
		if err != nil {
			return src.damaged(ctx, err)
		}
		if err := s.starts(system, src.Size); err != nil {
			return fmt.Errorf("the system %s isn't written, because Secure Boot is on: %w: sign it with the key of this machine's owner (gbctl image build --sign)", src.where(), err)
		}
		return s.fixed(image)
	})
}

// starts is why a firmware with Secure Boot wouldn't start a program.
func (s *Slots) starts(program io.ReaderAt, size int64) (err error) {
	if esp.SecureBoot(s.o.firmware) == esp.SecureOn {
		_, err = esp.Accepts(s.o.firmware, program, size)
	}
	return err
}

// fixed refuses kernel arguments of the configuration that a signed system doesn't have.
func (s *Slots) fixed(image esp.Image) error {
	cfg, err := configuration.Config(s.o.Store)
	if err != nil || !image.Signed {
		return nil
	}
	own := boot.ParseCmdline(image.Cmdline).Params
	for _, arg := range boot.ParseCmdline(strings.Join(cfg.Machine.Install.ExtraKernelArgs, " ")).Params {
		if !slices.Contains(own, arg) {
			return fmt.Errorf("machine.install.extraKernelArgs: release %s is signed for Secure Boot, and its kernel arguments can't change: "+
				"make it with %s (gbctl image build --sign DIR --extra-kernel-arg), or remove it from the configuration", image.Version, arg)
		}
	}
	return nil
}

// entries is room for what the boot loaders need to know of a system, several times, in bytes.
const entries = 64 << 10

// room refuses a system that doesn't fit into the slot that is to have it, in place of what the slot has.
func (s *Slots) room(ctx context.Context, src Source) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	slots, err := s.Get()
	if err != nil {
		return err
	}
	slot := slots.Target(s.Running())
	return s.o.Disks.UseEFI(ctx, func(dir string) error {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return err
		}
		left := int64(st.Bavail) * st.Bsize
		if former, err := os.Stat(esp.Partition(dir).System(slot)); err == nil {
			left += former.Size()
		}
		if left-entries < src.Size {
			return fmt.Errorf("the system %s has %d bytes, and the EFI system partition has room for %d in slot %s, which keeps what it has", src.where(), src.Size, max(left-entries, 0), slot)
		}
		return nil
	})
}

// Write has a system written to a slot, by its own program, and makes it the one that boots next. Until all of it is on
// the disk, the slot is empty. Of system, Excused, Kubernetes, Wiped and Args are used; the arguments come after those
// of the image.
func (s *Slots) Write(ctx context.Context, name string, src Source, system boot.Slot, report func(done, of int64)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.empty(ctx, name); err != nil {
		return err
	}
	var image esp.Image
	err := s.o.Disks.UseEFI(ctx, func(dir string) error {
		r := install.Request{Size: src.Size, SHA256: src.SHA256, Args: system.Args}
		path := esp.Partition(dir).System(name)
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		for _, p := range s.o.Cmdline.Params {
			if s.keeps(p) {
				r.Running = append(r.Running, p.String())
			}
		}
		err = s.read(ctx, src, func(from *io.SectionReader) error {
			written, err := s.install(ctx, r, src.Program, from, file, func(done int64) {
				if report != nil {
					report(done, src.Size)
				}
			})
			system.Version, system.Args = written.Version, written.Args
			if err == nil {
				image, err = esp.ReadImage(from, src.Size)
			}
			return err
		})
		if err != nil {
			return errors.Join(err, boot.IgnoreMissing(os.Remove(path)))
		}
		return nil
	})
	if err == nil {
		err = s.o.Disks.SealFor(ctx, image.PolicyKey)
	}
	if err != nil {
		return fmt.Errorf("write slot %s: %w", name, err)
	}
	if err := s.change(ctx, func(slots *boot.Slots) error { return slots.Written(name, system, time.Now()) }); err != nil {
		return err
	}
	if src.Image != "" { // its space is needed no longer
		if err := s.o.Images.Forget(ctx); err != nil {
			s.o.Log.Warn("remove the installer image", "image", src.Image, "err", err)
		}
	}
	return nil
}

// install runs the program of a system with a request, and returns its last report. The program has this hash, unless
// nobody has vouched for it.
func (s *Slots) install(ctx context.Context, r install.Request, hash string, system *io.SectionReader, slot *os.File, report func(done int64)) (last install.Report, err error) {
	request, err := json.Marshal(r)
	if err != nil {
		return last, err
	}
	program, err := esp.Program(system, r.Size)
	if err != nil {
		return last, fmt.Errorf("its program: %w", err)
	}
	defer program.Close()
	var checked io.Reader = program
	if hash != "" {
		checked = &vouched{from: program, sum: sha256.New(), want: hash}
	}
	reports, out := io.Pipe()
	var read sync.WaitGroup
	read.Go(func() {
		lines := json.NewDecoder(reports)
		for {
			var line install.Report
			if err := lines.Decode(&line); err != nil {
				_, _ = io.Copy(io.Discard, reports) // the program must not wait
				return
			}
			if last = line; line.Done > 0 {
				report(line.Done)
			}
		}
	})
	if _, err = system.Seek(0, io.SeekStart); err == nil {
		err = s.o.run(ctx, checked, io.MultiReader(bytes.NewReader(append(request, '\n')), system), out, slot)
	}
	out.Close()
	read.Wait()
	switch {
	case last.Error != "":
		return last, errors.New(last.Error)
	case err == nil && last.Version == "":
		err = errors.New("its program has ended without a result")
	}
	return last, err
}

// keeps reports whether a system on the disk has an argument of this boot. Credentials for the
// configuration are used once, unless the next boot has no configuration without them.
func (s *Slots) keeps(p boot.Param) bool {
	cfg, err := configuration.Config(s.o.Store)
	return !p.Credentials() || err != nil || cfg.Persist != nil && !*cfg.Persist
}

// args are those that this boot has.
func (s *Slots) args() (args []string) {
	for _, p := range s.o.Cmdline.Params {
		if s.keeps(p) && !p.Set() {
			args = append(args, p.String())
		}
	}
	return args
}
