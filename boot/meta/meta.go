// Package meta is the store on partition META: a few small values that a machine needs
// before STATE is mounted, such as the slot to boot. The reason of the last shutdown isn't
// among them: the next boot reads it after STATE is mounted, and it is a file there.
//
// The partition has two copies. Each has a header with a sequence number and the
// SHA-256 of the values after it, which are a JSON object. A write replaces the older
// copy. After a power cut during a write, the newer copy is still whole and is read:
//
//	0                 half of the partition
//	├── copy, seq 6 ──┼── copy, seq 7 ──┤   read: 7; the next write: 8, over 6
//
// The header is written with the values in one call, and begins with a magic number that no
// other content of a partition with this name has.
package meta

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"
)

const (
	// version of the format. Only a newer release can read a copy with a higher
	// version.
	version = 1
	// sector is the alignment of both copies and of all writes: disks have sectors
	// of 512 or 4096 bytes.
	sector = 4096
	// MaxSize is the limit of all values together, as JSON, in bytes.
	MaxSize = 64 << 10
	// smallest is the size of a partition with room for both copies.
	smallest = 2 * (headerSize + MaxSize)

	headerSize = 64
)

var magic = [8]byte{'G', 'B', 'M', 'E', 'T', 'A', 0x0d, 0x0a}

// header is at the beginning of each copy, in big-endian order.
type header struct {
	Magic   [8]byte
	Version uint32
	Length  uint32 // of the values
	Seq     uint64
	Sum     [sha256.Size]byte // of the header with a sum of zeros, and the values
	Rest    [8]byte           // zeros
}

var (
	// ErrEmpty is returned for a partition without a complete copy.
	ErrEmpty = errors.New("META has no values")
	// ErrNewer is returned for values of a newer release.
	ErrNewer = errors.New("META was written by a newer release")
)

// Device is a partition, or a file in tests.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// mu is held over every change of a partition.
var mu sync.Mutex

// content is that of a partition.
type content struct {
	values map[string]json.RawMessage
	seq    uint64
	next   int64 // where the copy is that the next write replaces
}

// load reads a partition of this size in bytes. With ErrEmpty, it can be written to all the same.
func load(device Device, size int64) (c content, err error) {
	if size < smallest {
		return c, fmt.Errorf("META has %d bytes, and needs %d", size, smallest)
	}
	err = ErrEmpty
	half := size / 2 / sector * sector
	for _, at := range []int64{0, half} {
		h, values, unread := read(device, at)
		switch {
		case errors.Is(unread, ErrEmpty):
		case unread != nil:
			return c, unread
		case err != nil || h.Seq > c.seq:
			c, err = content{values, h.Seq, half - at}, nil
		}
	}
	return c, err
}

// read reads a copy. The error is ErrEmpty for something that isn't a complete one.
func read(device Device, at int64) (h header, values map[string]json.RawMessage, err error) {
	data := make([]byte, headerSize+MaxSize)
	if n, err := device.ReadAt(data, at); err != nil && (!errors.Is(err, io.EOF) || n < headerSize) {
		return h, nil, fmt.Errorf("read META: %w", err)
	}
	if err := binary.Read(bytes.NewReader(data), binary.BigEndian, &h); err != nil {
		return h, nil, err
	}
	switch {
	case h.Magic != magic || h.Length > MaxSize || sum(h, data[headerSize:headerSize+h.Length]) != h.Sum:
		return h, nil, ErrEmpty
	case h.Version > version:
		return h, nil, fmt.Errorf("%w: format %d, and this release has %d", ErrNewer, h.Version, version)
	case json.Unmarshal(data[headerSize:headerSize+h.Length], &values) != nil:
		return h, nil, ErrEmpty
	}
	return h, values, nil
}

func sum(h header, values []byte) [sha256.Size]byte {
	h.Sum = [sha256.Size]byte{}
	hash := sha256.New()
	_ = binary.Write(hash, binary.BigEndian, h) // a hash returns no error
	hash.Write(values)
	return [sha256.Size]byte(hash.Sum(nil))
}

// Change is a set of new values that are written together.
type Change struct{ values map[string]json.RawMessage }

// Update calls change with the values of a partition of this size in bytes. If it returns no error, Update writes them,
// unless they are the same: who only reads mustn't undo what another one writes. After Update they are on the disk;
// after an error, these or the old ones.
func Update(device Device, size int64, change func(c Change) error) error {
	mu.Lock()
	defer mu.Unlock()
	was, err := load(device, size)
	if err != nil && !errors.Is(err, ErrEmpty) {
		return err
	}
	c := Change{map[string]json.RawMessage{}}
	maps.Copy(c.values, was.values)
	if err := change(c); err != nil || maps.EqualFunc(c.values, was.values, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
		return err
	}
	text, err := json.Marshal(c.values)
	if err != nil {
		return err
	}
	if len(text) > MaxSize {
		return fmt.Errorf("write META: %d bytes are more than %d", len(text), MaxSize)
	}
	h := header{Magic: magic, Version: version, Length: uint32(len(text)), Seq: was.seq + 1}
	h.Sum = sum(h, text)
	var data bytes.Buffer
	_ = binary.Write(&data, binary.BigEndian, h)
	data.Write(text)
	data.Write(make([]byte, (sector-data.Len()%sector)%sector)) // whole sectors, so that the disk need not read first
	if _, err = device.WriteAt(data.Bytes(), was.next); err == nil {
		err = device.Sync()
	}
	if err != nil {
		return fmt.Errorf("write META: %w", err)
	}
	return nil
}

// Key is the name of a value in the store, with the value's type.
type Key[T any] struct{ Name string }

// In reads the value; zero: there is none.
func (k Key[T]) In(c Change) (value T, err error) {
	if text, there := c.values[k.Name]; there {
		err = json.Unmarshal(text, &value)
	}
	if err != nil {
		err = fmt.Errorf("META: %s: %w", k.Name, err)
	}
	return value, err
}

// Put sets the value.
func (k Key[T]) Put(c Change, value T) error {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("META: %s: %w", k.Name, err)
	}
	c.values[k.Name] = text
	return nil
}

// Use is Update for a partition's device, or for a file.
func Use(path string, change func(c Change) error) error {
	return open(path, func(device Device, size int64) error { return Update(device, size, change) })
}

func open(path string, use func(device Device, size int64) error) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		err = use(f, size)
	}
	return errors.Join(err, f.Close())
}
