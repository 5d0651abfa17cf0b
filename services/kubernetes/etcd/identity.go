package etcd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// walHead is how much of a log file is read: the needed records at its
	// beginning have less than 200 bytes.
	walHead = 4 << 10
	// walRecords is how many records are searched for the metadata, which is the second one.
	walRecords = 4

	// From etcd's log, go.etcd.io/etcd/server/v3/storage/wal: the type of the
	// record, and where the length of a record ends and that of its padding begins.
	walMetadata   = 1
	walLengthBits = 56
	walPadding    = 7
)

// identity is the member and the cluster of the data in a directory.
type identity struct{ member, cluster uint64 }

// identity reads it from the beginning of etcd's log, so that it is known even
// if etcd doesn't run. ok is false if there is no log yet.
func (e *Etcd) identity() (id identity, ok bool, err error) {
	dir := filepath.Join(e.o.DataDir, "member", "wal")
	names, err := untrusted.Glob(dir, "*.wal") // sorted: they have numbers
	if err != nil || len(names) == 0 {
		return identity{}, false, err
	}
	file, err := untrusted.Open(names[0])
	if err != nil {
		return identity{}, false, boot.IgnoreMissing(err) // purged just now
	}
	defer file.Close()
	head := make([]byte, walHead)
	n, err := io.ReadFull(file, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return identity{}, false, err
	}
	id, err = parseIdentity(head[:n])
	if err != nil {
		return identity{}, false, fmt.Errorf("etcd's log %s: %w", names[0], err)
	}
	return id, true, nil
}

var errNoMetadata = errors.New("it has no IDs of member and cluster at its beginning: it was truncated, or is of another release of etcd")

// parseIdentity finds the metadata among the first records. Each is a length of
// 64 bits, whose upper byte is about padding, and a protobuf message.
func parseIdentity(head []byte) (identity, error) {
	for range walRecords {
		if len(head) < 8 {
			break
		}
		length := binary.LittleEndian.Uint64(head)
		size := length & (1<<walLengthBits - 1)
		if length>>63 != 0 {
			size += length >> walLengthBits & walPadding
		}
		head = head[8:]
		if size == 0 || size > uint64(len(head)) {
			break
		}
		// A record has its type and its data; it ends where the padding begins.
		if numbers, texts := fields(head[:size]); numbers[1] == walMetadata {
			numbers, _ = fields(texts[3])
			if numbers[1] == 0 || numbers[2] == 0 {
				return identity{}, errNoMetadata
			}
			return identity{member: numbers[1], cluster: numbers[2]}, nil
		}
		head = head[size:]
	}
	return identity{}, errNoMetadata
}

// fields are the numbers and the texts of a message, by the number of the field, until a field
// can't be read.
func fields(b []byte) (numbers map[protowire.Number]uint64, texts map[protowire.Number][]byte) {
	numbers, texts = map[protowire.Number]uint64{}, map[protowire.Number][]byte{}
	for len(b) > 0 {
		n, t, used := protowire.ConsumeTag(b)
		if used < 0 {
			break
		}
		b = b[used:]
		switch t {
		case protowire.VarintType:
			numbers[n], used = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			texts[n], used = protowire.ConsumeBytes(b)
		default:
			used = protowire.ConsumeFieldValue(n, t, b)
		}
		if used < 0 {
			break
		}
		b = b[used:]
	}
	return numbers, texts
}
