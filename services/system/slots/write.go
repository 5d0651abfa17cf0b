package slots

import (
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
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"
)

// Source is a system that can be written to a slot.
type Source struct {
	esp.Medium
	Label string `json:"label,omitempty"` // of the medium
	Image string `json:"image,omitempty"` // where it is instead
}

func (src Source) String() string { return fmt.Sprintf("Garboard %s %s", src.Version, src.where()) }

func (src Source) where() string {
	if src.Image != "" {
		return "in the image " + src.Image
	}
	return "on the medium " + src.Label
}

// ErrNoMedium is the error of Medium if no medium with a system is there.
var ErrNoMedium = errors.New("no medium with a system of Garboard is in this machine")

// Medium finds the system on a medium.
func (s *Slots) Medium(ctx context.Context) (src Source, err error) {
	for _, label := range []string{boot.MediumLabel, boot.ISOLabel} {
		src, err = s.describe(ctx, Source{Label: label})
		if !errors.Is(err, boot.ErrNone) {
			return src, err
		}
	}
	return src, ErrNoMedium
}

// Pull fetches an installer image, and finds the system in it.
func (s *Slots) Pull(ctx context.Context, image string, report func(done, of int64)) (src Source, err error) {
	if err := s.o.Images.Fetch(ctx, image, report); err != nil {
		return src, err
	}
	src, err = s.describe(ctx, Source{Image: image})
	if errors.Is(err, boot.ErrNone) {
		err = fmt.Errorf("%s is no installer image: it has no /%s/%s", image, esp.InstallDir, esp.MediumFile)
	}
	return src, err
}

// describe reads what is said of the system there.
func (s *Slots) describe(ctx context.Context, src Source) (Source, error) {
	err := s.files(ctx, src, func(files fs.FS) error {
		data, err := fs.ReadFile(files, esp.MediumFile)
		if errors.Is(err, fs.ErrNotExist) {
			return boot.ErrNone // a volume that has only a configuration
		}
		if err == nil {
			err = json.Unmarshal(data, &src.Medium)
		}
		if err == nil && (src.Offset < 0 || src.Size <= 0 || !fs.ValidPath(src.File)) {
			err = fmt.Errorf("%s describes no system", esp.MediumFile)
		}
		if err != nil {
			return src.damaged(err)
		}
		if s.Running() != "" && semver.Compare(boot.Version, src.From) < 0 {
			return fmt.Errorf("release %s upgrades machines from release %s on, and this one runs %s: upgrade to that release first", src.Version, src.From, boot.Version)
		}
		return nil
	})
	return src, err
}

// files calls use with the directory that has the system.
func (s *Slots) files(ctx context.Context, src Source, use func(fs.FS) error) error {
	if src.Image == "" {
		return s.o.Disks.Volume(ctx, src.Label, use)
	}
	return s.o.Images.Files(ctx, src.Image, func(root fs.FS) error {
		dir, err := fs.Sub(root, esp.InstallDir)
		if err != nil {
			return err
		}
		return use(dir)
	})
}

func (src Source) damaged(err error) error {
	return fmt.Errorf("the system %s is damaged: make it again (gbctl media build): %w", src.where(), err)
}

// read calls use with the bytes of the system.
func (s *Slots) read(ctx context.Context, src Source, use func(system *io.SectionReader) error) error {
	err := s.files(ctx, src, func(files fs.FS) error {
		f, err := files.Open(src.File)
		if err != nil {
			return err
		}
		defer f.Close()
		at, ok := f.(io.ReaderAt)
		if !ok {
			return fmt.Errorf("%s can't be read from the middle", src.File)
		}
		return use(io.NewSectionReader(at, src.Offset, src.Size))
	})
	if errors.Is(err, boot.ErrNone) {
		return fmt.Errorf("the medium %s isn't in the machine any more", src.Label)
	}
	return err
}

// Verify reads the whole system, and refuses one that isn't as it was made.
func (s *Slots) Verify(ctx context.Context, src Source, report func(done, of int64)) error {
	return s.read(ctx, src, func(system *io.SectionReader) error {
		if err := src.check(ctx, system, io.Discard, report); err != nil {
			return src.damaged(err)
		}
		if _, err := esp.ReadImage(system, src.Size); err != nil {
			return src.damaged(err)
		}
		return nil
	})
}

// check copies the system, and compares its hash.
func (src Source) check(ctx context.Context, from io.Reader, to io.Writer, report func(done, of int64)) error {
	sum := sha256.New()
	buffer := make([]byte, 1<<20)
	for done := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n, err := io.ReadFull(from, buffer)
		sum.Write(buffer[:n]) // never fails (hash.Hash)
		if _, err := to.Write(buffer[:n]); err != nil {
			return err
		}
		if done += int64(n); report != nil {
			report(done, src.Size)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != src.SHA256 {
		return fmt.Errorf("its system has the SHA-256 %.16s…, and should have %.16s…", got, src.SHA256)
	}
	return nil
}

// Write writes a system to a slot, and makes it the one that boots next. Until all of it is on the disk, the slot is empty. Of system,
// Excused and Args are used; the arguments come after those of the image.
func (s *Slots) Write(ctx context.Context, name string, src Source, system boot.Slot, report func(done, of int64)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.change(ctx, func(slots *boot.Slots) error { return slots.Write(name, time.Now()) }); err != nil {
		return err
	}
	err := s.o.Disks.UseEFI(ctx, func(dir string) error {
		path := esp.Partition(dir).System(name)
		err := s.read(ctx, src, func(from *io.SectionReader) error { return src.writeTo(ctx, path, from, report) })
		if err != nil {
			return errors.Join(err, remove(path))
		}
		image, err := readImage(path)
		system.Version, system.Args = image.Version, s.argsFor(image, system.Args)
		return err
	})
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

func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// writeTo writes a file, and reads it back from the disk.
func (src Source) writeTo(ctx context.Context, path string, from io.Reader, report func(done, of int64)) (err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var room unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &room); err != nil {
		return err
	}
	if free := int64(room.Bavail) * room.Bsize; free < src.Size {
		return fmt.Errorf("the system has %d bytes, and the EFI system partition has %d left", src.Size, free)
	}
	if err := src.check(ctx, from, file, report); err != nil {
		return src.damaged(err)
	}
	if err := file.Sync(); err != nil {
		return err
	}
	// What is in memory is forgotten, so that what the disk has is read.
	if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := src.check(ctx, file, io.Discard, nil); err != nil {
		return fmt.Errorf("the disk doesn't keep what is written to it: %w", err)
	}
	return nil
}

func readImage(path string) (esp.Image, error) {
	file, err := os.Open(path)
	if err != nil {
		return esp.Image{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return esp.Image{}, err
	}
	return esp.ReadImage(file, info.Size())
}

// own are the parameters of this machine's command line that describe the machine, and not its medium.
func own(p boot.Param) bool {
	return strings.HasPrefix(p.Key, "garboard.") && p.Key != boot.ParamSlot && p.Key != boot.ParamTrial && p.String() != boot.ISOArgument
}

// argsFor are the kernel arguments for an image: its own, those that describe this machine, and more.
func (s *Slots) argsFor(image esp.Image, more []string) (args []string) {
	for _, p := range boot.ParseCmdline(image.Cmdline).Params {
		if p.String() != boot.ISOArgument {
			args = append(args, p.String())
		}
	}
	for _, p := range s.o.Cmdline.Params {
		if arg := p.String(); own(p) && !slices.Contains(args, arg) {
			args = append(args, arg)
		}
	}
	for _, arg := range more {
		if !slices.Contains(args, arg) {
			args = append(args, arg)
		}
	}
	return args
}

// args are those that this boot has.
func (s *Slots) args() (args []string) {
	for _, p := range s.o.Cmdline.Params {
		if p.Key != boot.ParamSlot && p.Key != boot.ParamTrial && p.Key != "BOOT_IMAGE" && p.Key != "initrd" {
			args = append(args, p.String())
		}
	}
	return args
}
