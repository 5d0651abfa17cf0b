package files

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"gopkg.in/yaml.v3"
)

const (
	// recordDir is on the disk that the files are on: wiping it takes both.
	recordDir  = boot.EphemeralDir + "/lib/garboard"
	recordFile = recordDir + "/files.yaml"
	maxRecord  = 4 << 20 // bytes; a configuration has one MiB at most
)

func digest(data []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

// write makes the file at path what it is to be.
func (d *Daemon) write(img image, path string, f *file) error {
	full := d.at(path)
	old, mode, err := read(full, len(f.content))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case bytes.Equal(old, f.content) && mode == fs.FileMode(f.mode):
		d.laid[path] = digest(f.content)
		return nil
	case f.op != config.FileOverwrite && d.laid[path] == "" && !bytes.Equal(old, f.content):
		base, _, there, err := img.file(path)
		if err != nil {
			return err
		}
		if !there || !bytes.Equal(old, base) {
			return errors.New("another program has made it: use op overwrite to replace it")
		}
	}
	if err := d.makeDirs(filepath.Dir(full)); err != nil {
		return err
	}
	// Noted before it is there: a file that nobody knows of would stay for ever.
	before, known := d.laid[path]
	d.laid[path] = digest(f.content)
	err = d.writeRecord()
	if err == nil {
		err = untrusted.WriteFile(full, f.content, fs.FileMode(f.mode))
	}
	if err != nil && known {
		d.laid[path] = before
	} else if err != nil {
		delete(d.laid, path)
	}
	return err
}

// read returns a regular file of the node that may be what is wanted: more than
// that many bytes are a different content in any case.
func read(path string, size int) (content []byte, mode fs.FileMode, err error) {
	f, err := untrusted.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	content, err = io.ReadAll(io.LimitReader(f, int64(max(size, maxImageFile))+1))
	return content, info.Mode().Perm(), err
}

// makeDirs makes the directories of a file and remembers those that are new.
func (d *Daemon) makeDirs(dir string) error {
	if err := untrusted.Mkdir(dir, 0o755); err == nil {
		d.made[dir] = true
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		if info, serr := untrusted.Stat(dir); serr == nil && info.IsDir() {
			return nil
		}
		return err
	}
	if err := d.makeDirs(filepath.Dir(dir)); err != nil {
		return err
	}
	return d.makeDirs(dir)
}

// takeBack makes the file what it is without the configuration: the image's, or
// nothing. What another program has made of it in /var since stays.
func (d *Daemon) takeBack(img image, path string) {
	if err := d.restore(img, path); err != nil {
		d.log.Warn(fmt.Sprintf("take %s back, which isn't configured any more: %v; trying again", path, err))
		d.broken = true
		return
	}
	delete(d.laid, path)
}

func (d *Daemon) restore(img image, path string) error {
	full := d.at(path)
	base, mode, there, err := img.file(path)
	if err != nil {
		return err
	}
	if there {
		return untrusted.WriteFile(full, base, mode)
	}
	now, _, err := read(full, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if config.Within(path, boot.EphemeralDir) && (err != nil || digest(now) != d.laid[path]) {
		d.log.Warn(fmt.Sprintf("%s isn't configured any more, but was changed by another program: it stays", path))
		return nil
	}
	if err := untrusted.Remove(full); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for dir := filepath.Dir(full); d.made[dir] && untrusted.Remove(dir) == nil; dir = filepath.Dir(dir) {
		delete(d.made, dir)
	}
	return nil
}

// readRecord is what earlier boots have laid in /var.
func (d *Daemon) readRecord() (map[string]string, error) {
	laid := map[string]string{}
	data, err := untrusted.ReadFile(d.at(recordFile), maxRecord)
	if err != nil {
		return laid, boot.IgnoreMissing(err)
	}
	if err := yaml.Unmarshal(data, &laid); err != nil {
		return nil, fmt.Errorf("%s: %w", recordFile, err)
	}
	// It says what may be removed, so it is believed only where files are laid.
	maps.DeleteFunc(laid, func(path, _ string) bool {
		return !config.Within(path, boot.EphemeralDir) || filepath.Clean(path) != path || config.FilePlace(path) != nil
	})
	return laid, nil
}

// writeRecord notes what is laid in /var.
func (d *Daemon) writeRecord() error {
	kept := maps.Clone(d.laid)
	maps.DeleteFunc(kept, func(path, _ string) bool { return !config.Within(path, boot.EphemeralDir) })
	data, err := yaml.Marshal(kept)
	if err != nil {
		return fmt.Errorf("note the files in %s: %w", boot.EphemeralDir, err)
	}
	full := d.at(recordFile)
	old, err := untrusted.ReadFile(full, maxRecord)
	if err == nil && bytes.Equal(old, data) || errors.Is(err, fs.ErrNotExist) && len(kept) == 0 {
		return nil
	}
	if err := untrusted.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		return fmt.Errorf("note the files in %s: %w", boot.EphemeralDir, err)
	}
	return untrusted.WriteFile(full, data, 0o600)
}
