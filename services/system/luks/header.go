package luks

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// The binary header (section 2.1 of the specification): where its fields are, in bytes.
const (
	headerSize  = 4096
	headerSum   = 448
	headerEnd   = 512
	headerTotal = 8       // its size with the JSON area, which is also where the second one begins
	headerMost  = 4 << 20 // of that size
)

// damage is what is wrong with the two headers of a device. Each is the copy of the other.
func damage(device string) error {
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	defer file.Close()
	size, err := check(file, 0, "LUKS\xba\xbe")
	if err != nil {
		return fmt.Errorf("the first one: %w", err)
	}
	if _, err = check(file, size, "SKUL\xba\xbe"); err != nil {
		return fmt.Errorf("the second one: %w", err)
	}
	return nil
}

// header reads one, with its JSON area.
func header(r io.ReaderAt, at int64) ([]byte, error) {
	head := make([]byte, headerSize)
	if _, err := r.ReadAt(head, at); err != nil {
		return nil, err
	}
	total := binary.BigEndian.Uint64(head[headerTotal:])
	if total <= headerSize || total > headerMost {
		return nil, fmt.Errorf("it has a size of %d", total)
	}
	all := make([]byte, total)
	_, err := r.ReadAt(all, at)
	return all, err
}

// check verifies a header, and returns its size. Those that package luks makes have sums of SHA-256.
func check(r io.ReaderAt, at int64, magic string) (size int64, err error) {
	all, err := header(r, at)
	if err != nil {
		return 0, err
	}
	if !bytes.HasPrefix(all, []byte(magic)) {
		return 0, errors.New("it has no magic number")
	}
	want := bytes.Clone(all[headerSum:headerEnd])
	clear(all[headerSum:headerEnd])
	if sum := sha256.Sum256(all); !bytes.HasPrefix(want, sum[:]) {
		return 0, errors.New("its checksum is wrong")
	}
	return int64(len(all)), nil
}
