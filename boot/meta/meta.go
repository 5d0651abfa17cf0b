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
	// ErrNotFound is returned for a key that isn't there.
	ErrNotFound = errors.New("no such key in META")
)

// Device is a partition, or a file in tests.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// mu guards the fields of all stores, and is held over every change of a partition: a process may have several stores
// of one, and each begins with what the others have written.
var mu sync.Mutex

// Store is the values of a partition.
type Store struct {
	device Device
	half   int64 // start of the second copy

	values map[string]json.RawMessage
	seq    uint64
	next   int // the copy that the next write replaces: 0 or 1
}

// Open reads the values of a partition of this size in bytes. The store can be
// used despite ErrEmpty: it then has no values.
func Open(device Device, size int64) (*Store, error) {
	if size < smallest {
		return nil, fmt.Errorf("META has %d bytes, and needs %d", size, smallest)
	}
	s := &Store{device: device, half: size / 2 / sector * sector}
	err := s.load()
	if err != nil && !errors.Is(err, ErrEmpty) {
		return nil, err
	}
	return s, err
}

// load reads what the partition has by now.
func (s *Store) load() error {
	s.values, s.seq, s.next = map[string]json.RawMessage{}, 0, 0
	found := false
	var newer error
	for i := range 2 {
		h, values, err := s.read(i)
		switch {
		case errors.Is(err, ErrNewer):
			newer = err
		case errors.Is(err, errDamaged):
		case err != nil:
			return err
		case !found || h.Seq > s.seq:
			found, s.values, s.seq, s.next = true, values, h.Seq, 1-i
		}
	}
	if newer != nil {
		return newer
	}
	if !found {
		return ErrEmpty
	}
	return nil
}

// errDamaged is returned for something that isn't a complete copy.
var errDamaged = errors.New("it isn't a whole copy")

func (s *Store) read(i int) (h header, values map[string]json.RawMessage, err error) {
	data := make([]byte, headerSize+MaxSize)
	if n, err := s.device.ReadAt(data, int64(i)*s.half); err != nil && (!errors.Is(err, io.EOF) || n < headerSize) {
		return h, nil, fmt.Errorf("read META: %w", err)
	}
	if err := binary.Read(bytes.NewReader(data), binary.BigEndian, &h); err != nil {
		return h, nil, err
	}
	switch {
	case h.Magic != magic || h.Length > MaxSize:
		return h, nil, errDamaged
	case sum(h, data[headerSize:headerSize+h.Length]) != h.Sum:
		return h, nil, errDamaged
	case h.Version > version:
		return h, nil, fmt.Errorf("%w: format %d, and this release has %d", ErrNewer, h.Version, version)
	}
	if err := json.Unmarshal(data[headerSize:headerSize+h.Length], &values); err != nil {
		return h, nil, errDamaged
	}
	if values == nil {
		values = map[string]json.RawMessage{}
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

// Update calls change with the values. If it returns no error, Update writes them, unless they are the same: who only
// reads mustn't undo what another one writes. After Update they are on the disk; after an error, the old ones still
// are.
func (s *Store) Update(change func(c Change) error) error {
	mu.Lock()
	defer mu.Unlock()
	if err := s.load(); err != nil && !errors.Is(err, ErrEmpty) {
		return err
	}
	c := Change{make(map[string]json.RawMessage, len(s.values))}
	maps.Copy(c.values, s.values)
	if err := change(c); err != nil || maps.EqualFunc(c.values, s.values, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
		return err
	}
	if err := s.write(c.values); err != nil {
		return err
	}
	s.values = c.values
	return nil
}

func (s *Store) write(values map[string]json.RawMessage) error {
	text, err := json.Marshal(values)
	if err != nil {
		return err
	}
	if len(text) > MaxSize {
		return fmt.Errorf("write META: %d bytes are more than %d", len(text), MaxSize)
	}
	h := header{Magic: magic, Version: version, Length: uint32(len(text)), Seq: s.seq + 1}
	h.Sum = sum(h, text)
	var data bytes.Buffer
	_ = binary.Write(&data, binary.BigEndian, h)
	data.Write(text)
	data.Write(make([]byte, (sector-data.Len()%sector)%sector)) // whole sectors, so that the disk need not read first
	if _, err := s.device.WriteAt(data.Bytes(), int64(s.next)*s.half); err != nil {
		return fmt.Errorf("write META: %w", err)
	}
	if err := s.device.Sync(); err != nil {
		return fmt.Errorf("write META: %w", err)
	}
	s.seq, s.next = h.Seq, 1-s.next
	return nil
}

// Key is the name of a value in the store, with the value's type.
type Key[T any] struct{ Name string }

// Get reads the value. The error is ErrNotFound if there is none.
func (k Key[T]) Get(s *Store) (value T, err error) {
	mu.Lock()
	defer mu.Unlock()
	return k.In(Change{s.values})
}

// In is Get within Update.
func (k Key[T]) In(c Change) (value T, err error) {
	text, there := c.values[k.Name]
	if !there {
		return value, fmt.Errorf("%w: %s", ErrNotFound, k.Name)
	}
	if err := json.Unmarshal(text, &value); err != nil {
		return value, fmt.Errorf("META: %s: %w", k.Name, err)
	}
	return value, nil
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

// Use is Update for the store of a partition's device, which may have no values yet.
func Use(path string, change func(c Change) error) error {
	s, f, err := OpenFile(path)
	if s == nil {
		return err
	}
	return errors.Join(s.Update(change), f.Close())
}

// OpenFile opens the store of a partition's device, or of a file.
func OpenFile(path string) (*Store, *os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	s, err := Open(f, size)
	if s == nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return s, f, err
}
