package disks

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/volume"
)

const (
	// keptState is a file on the EFI partition with all of STATE, while that is made anew: a SHA-256, and a tar
	// archive.
	keptState = "state.tar"
	// maxKept bounds what is in memory, and on the EFI partition. STATE has some MiB.
	maxKept = 64 << 20
)

// MarkEncrypt has the next boot encrypt STATE, with what is on it. It begins with the keys of the configuration that
// are the machine's own; others are added when the node runs.
func (d *Disks) MarkEncrypt() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	system := d.System()
	if system == nil {
		return ErrNoSystem
	}
	keys, err := d.layers[0].Keys()
	if err != nil {
		return err
	}
	if len(plain(keys)) == 0 {
		return errors.New("STATE is encrypted in place with a nodeID or static key first: give machine.systemDiskEncryption.state one. " +
			"The others are added then, and it may go")
	}
	if err := d.keep(keys); err != nil {
		return err
	}
	return system.Note(disk.Journal{Step: disk.StepEncrypt, Label: boot.LabelState})
}

// plain are the keys of which nobody has to be asked.
func plain(keys []luks.Key) []luks.Key {
	return slices.DeleteFunc(slices.Clone(keys), func(k luks.Key) bool { return k.Sealer != nil || k.Err != nil })
}

// encryptState does what MarkEncrypt has recorded, before STATE is used. Whenever the power goes, the next boot goes
// on:
//
//	all of STATE is in a file ─▶ STATE is zeros ─▶ it is made, and has all again ─▶ the file is zeros, and goes ─▶ done
//
// Until the file is complete, an error leaves STATE as it is. What is encrypted is never written in the clear: anybody
// may have written the journal.
func (d *Disks) encryptState(ctx context.Context, f disk.Disk) error {
	if f.Pending.Step != disk.StepEncrypt {
		return nil
	}
	begun := false
	efi, err := f.Device(boot.LabelEFI)
	if err == nil {
		err = d.useEFI(ctx, efi.Path, func(dir string) error {
			path := filepath.Join(dir, keptState)
			content, err := complete(path), error(nil)
			if content == nil {
				content, err = d.readState(ctx, f)
				sum := sha256.Sum256(content)
				if err == nil && content != nil {
					err = boot.WriteFile(path, append(sum[:], content...), 0o600)
				}
			}
			if err == nil && content != nil {
				begun = true
				err = d.writeState(ctx, f, content)
			}
			if err != nil && begun {
				return err
			}
			return errors.Join(err, forget(dir))
		})
	}
	if err != nil && begun {
		return fmt.Errorf("encrypt STATE: %w", err)
	}
	if err != nil {
		d.log.Error("STATE isn't encrypted, and stays as it is", "err", err)
	}
	return f.Note(disk.Journal{})
}

// complete is the archive of a file; nil: it isn't all there.
func complete(path string) []byte {
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxKept+sha256.Size))
	if err != nil || len(text) <= sha256.Size || sha256.Sum256(text[sha256.Size:]) != [sha256.Size]byte(text) {
		return nil
	}
	return text[sha256.Size:]
}

// forget overwrites the file, and what a power cut has left of it, with zeros, and removes it.
func forget(dir string) (err error) {
	all, _ := filepath.Glob(filepath.Join(dir, "*"+keptState+"*")) // the pattern is right
	for _, path := range all {
		file, failed := os.OpenFile(path, os.O_WRONLY, 0)
		if failed == nil {
			var size int64
			size, failed = file.Seek(0, io.SeekEnd)
			_, zeroed := file.WriteAt(make([]byte, min(size, maxKept+sha256.Size)), 0)
			failed = errors.Join(failed, zeroed, file.Sync(), file.Close(), os.Remove(path))
		}
		err = errors.Join(err, failed)
	}
	return errors.Join(err, boot.SyncDir(dir))
}

// readState is an archive of STATE; nil if that is encrypted already.
func (d *Disks) readState(ctx context.Context, f disk.Disk) ([]byte, error) {
	device, err := volume.Partition(ctx, f.Path, boot.LabelState)
	if err != nil {
		return nil, err
	}
	if sealed, _, err := d.layers[0].Show(device); sealed != "" || err != nil {
		return nil, err
	}
	defer d.Keeper.Close()
	if err := d.Keeper.Open(ctx, f, d.volumes[0]); err != nil {
		return nil, err
	}
	return pack(d.volumes[0].Dir)
}

// pack is an archive of the directories and files in a directory.
func pack(dir string) ([]byte, error) {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	add := func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() && !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		head, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		if head.Name, err = filepath.Rel(dir, path); err != nil {
			return err
		}
		if archive.Len()+int(head.Size) > maxKept {
			return fmt.Errorf("STATE has more than %s", disk.SizeText(maxKept))
		}
		if err := w.WriteHeader(head); err != nil || e.IsDir() {
			return err
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = io.Copy(w, file)
		return err
	}
	err := filepath.WalkDir(dir, add)
	return archive.Bytes(), errors.Join(err, w.Close())
}

// writeState makes STATE anew with the content of an archive.
func (d *Disks) writeState(ctx context.Context, f disk.Disk, content []byte) error {
	d.Keeper.Close() // what an error has left
	kept, err := d.kept()
	if err != nil {
		return err
	}
	d.log.Warn("encrypting STATE of " + f.Path + ", with what is on it")
	p, err := f.Partition(boot.LabelState)
	if err != nil {
		return err
	}
	if err := d.Keeper.Before("encrypt"); err != nil {
		return err
	}
	err = f.Change(func(file *os.File) error {
		return errors.Join(p.Erase(ctx, file, true), file.Sync())
	})
	if err != nil {
		return err
	}
	d.making = plain(kept)
	err = d.Keeper.Make(ctx, f, d.volumes[0])
	d.making = nil
	if err == nil {
		err = d.Keeper.Open(ctx, f, d.volumes[0])
	}
	if err == nil {
		err = d.Keeper.Before("fill")
	}
	if err == nil {
		err = unpack(content, d.volumes[0].Dir)
	}
	return errors.Join(err, d.Keeper.Before("encrypted"))
}

// unpack writes an archive of readState into an empty directory.
func unpack(content []byte, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(bytes.NewReader(content)); ; {
		head, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if head.Typeflag == tar.TypeDir {
			err = root.MkdirAll(head.Name, 0o700)
		} else {
			var file *os.File
			if file, err = root.OpenFile(head.Name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err == nil {
				_, err = io.Copy(file, r)
				err = errors.Join(err, file.Close())
			}
		}
		if err = errors.Join(err, root.Chown(head.Name, head.Uid, head.Gid), root.Chmod(head.Name, head.FileInfo().Mode()),
			root.Chtimes(head.Name, head.ModTime, head.ModTime)); err != nil {
			return err
		}
	}
	file, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(file.Fd())), file.Close())
}
