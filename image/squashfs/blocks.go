package squashfs

import (
	"bytes"
	"encoding/binary"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
)

const (
	metadataSize = 8192 // bytes of a block of a table
	// A block that is stored as it is has this bit in its size.
	storedBlock    = 1 << 24
	storedMetadata = 1 << 15
	// worthwhile is the size from which a block is compressed: a smaller one gains nothing, and takes a millisecond.
	worthwhile = 64
)

// encoder is for one block at a time, from several goroutines. A block is at most as large as the window that the
// kernel allocates.
var encoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithEncoderCRC(false))
})

// block is one of data. Where it lies is known once all blocks are written.
type block struct {
	done    chan struct{} // closed when content is compressed
	content []byte
	start   uint64
	size    uint32
}

// blocks compresses blocks side by side, and writes them in order.
//
//	add ─▶ queue ─▶ write (one goroutine)
//	  └▶ compress (one goroutine per block) ─▶ block.done
type blocks struct {
	to      io.Writer
	zstd    *zstd.Encoder
	queue   chan *block
	written sync.WaitGroup
	// These belong to write until close returns.
	end uint64
	err error
}

func newBlocks(to io.Writer, start uint64) (*blocks, error) {
	e, err := encoder()
	if err != nil {
		return nil, err
	}
	b := &blocks{to: to, zstd: e, queue: make(chan *block, runtime.GOMAXPROCS(0)), end: start}
	b.written.Go(b.write)
	return b, nil
}

// add takes a block, and waits if too many are under way.
func (b *blocks) add(content []byte) *block {
	p := &block{done: make(chan struct{})}
	b.queue <- p
	go func() {
		p.content, p.size = content, uint32(len(content))|storedBlock
		if len(content) >= worthwhile {
			if packed := b.zstd.EncodeAll(content, nil); len(packed) < len(content) {
				p.content, p.size = packed, uint32(len(packed))
			}
		}
		close(p.done)
	}()
	return p
}

// addPacked takes a block that is compressed, or stored as it is, with its size as files have it.
func (b *blocks) addPacked(content []byte, size uint32) *block {
	p := &block{done: make(chan struct{}), content: content, size: size}
	close(p.done)
	b.queue <- p
	return p
}

func (b *blocks) write() {
	for p := range b.queue {
		<-p.done
		if p.start = b.end; b.err == nil {
			_, b.err = b.to.Write(p.content)
		}
		b.end += uint64(len(p.content))
		p.content = nil
	}
}

// close waits until all is written.
func (b *blocks) close() error {
	close(b.queue)
	b.written.Wait()
	return b.err
}

// metadata is a table: compressed blocks with their sizes.
type metadata struct {
	packed bytes.Buffer
	block  []byte // the last one
}

// position is where the next bytes will be: the start of their block, and the place in it.
func (m *metadata) position() (start uint32, offset uint16) {
	return uint32(m.packed.Len()), uint16(len(m.block))
}

// append adds fields, and returns their size.
func (m *metadata) append(fields ...any) (size uint32) {
	for _, field := range fields {
		added, _ := binary.Append(nil, binary.LittleEndian, field) // never fails: all have a fixed size
		size += uint32(len(added))
		m.block = append(m.block, added...)
	}
	for len(m.block) >= metadataSize {
		m.pack(m.block[:metadataSize])
		m.block = append([]byte(nil), m.block[metadataSize:]...)
	}
	return size
}

func (m *metadata) pack(content []byte) {
	packed, size := content, uint16(len(content))|storedMetadata
	if e, err := encoder(); err == nil {
		if smaller := e.EncodeAll(content, nil); len(smaller) < len(content) {
			packed, size = smaller, uint16(len(smaller))
		}
	}
	m.packed.Write(binary.LittleEndian.AppendUint16(nil, size))
	m.packed.Write(packed)
}

// bytes is the whole table.
func (m *metadata) bytes() []byte {
	if len(m.block) > 0 {
		m.pack(m.block)
		m.block = nil
	}
	return m.packed.Bytes()
}
