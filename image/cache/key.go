package cache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Key is the hex SHA-256 of the inputs. Each is preceded by its length, so that ("ab", "c") and ("a", "bc") differ.
func Key(inputs ...string) string {
	h := sha256.New()
	for _, in := range inputs {
		field(h, in)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// HashTree is the hash of files and directories: of the names below each given path, their types, contents and link
// targets, and whether they can be executed or carry a special bit. The other permissions don't count, because a
// checkout has them from the user's umask, and neither do the given paths themselves (a checkout may lie anywhere),
// only their order.
func HashTree(paths ...string) (string, error) {
	h := sha256.New()
	for _, root := range paths {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			return hashFile(h, name, path)
		})
		if err != nil {
			return "", fmt.Errorf("hash %s: %w", root, err)
		}
		field(h, "end of path")
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func hashFile(h hash.Hash, name, path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	field(h, name)
	field(h, significant(info.Mode()).String())
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		if err != nil {
			return err
		}
		field(h, target)
	case info.Mode().IsRegular():
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		content := sha256.New()
		if _, err := io.Copy(content, f); err != nil {
			return err
		}
		field(h, string(content.Sum(nil)))
	}
	return nil
}

// significant is the part of a mode that git and a umask leave alone.
func significant(mode fs.FileMode) fs.FileMode {
	kept := mode & (fs.ModeType | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	if mode.IsRegular() && mode&0o111 != 0 {
		kept |= 0o111
	}
	return kept
}

func field(h hash.Hash, s string) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(s)))
	h.Write(length[:])
	io.WriteString(h, s)
}
