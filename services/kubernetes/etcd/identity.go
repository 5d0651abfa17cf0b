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
		kind, data := walRecord(head[:size])
		if kind == walMetadata {
			return identityOf(data)
		}
		head = head[size:]
	}
	return identity{}, errNoMetadata
}

// walRecord is type (1) and data (3); it ends where the padding begins.
func walRecord(b []byte) (kind uint64, data []byte) {
	fields(b, func(n protowire.Number, v uint64, d []byte) {
		switch n {
		case 1:
			kind = v
		case 3:
			data = d
		}
	})
	return kind, data
}

func identityOf(b []byte) (id identity, err error) {
	fields(b, func(n protowire.Number, v uint64, _ []byte) {
		switch n {
		case 1:
			id.member = v
		case 2:
			id.cluster = v
		}
	})
	if id.member == 0 || id.cluster == 0 {
		return identity{}, errNoMetadata
	}
	return id, nil
}

// fields calls take for each field of a message, until a field can't be read.
func fields(b []byte, take func(n protowire.Number, v uint64, data []byte)) {
	for len(b) > 0 {
		n, t, used := protowire.ConsumeTag(b)
		if used < 0 {
			return
		}
		b = b[used:]
		var v uint64
		var data []byte
		switch t {
		case protowire.VarintType:
			v, used = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			data, used = protowire.ConsumeBytes(b)
		default:
			used = protowire.ConsumeFieldValue(n, t, b)
		}
		if used < 0 {
			return
		}
		take(n, v, data)
		b = b[used:]
	}
}
