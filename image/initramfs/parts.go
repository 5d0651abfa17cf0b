package initramfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/klauspost/compress/zstd"
	"github.com/u-root/u-root/pkg/cpio"
)

// Parts are what an archive that Write has written is made of, with the microcode that may come before it.
type Parts struct {
	// RootFS is the root filesystem.
	RootFS           *io.SectionReader
	microcode, small []byte
}

const (
	cpioMagic   = "070701"
	cpioTrailer = "TRAILER!!!"
)

// Open finds the parts of an archive.
func Open(archive []byte) (Parts, error) {
	p, err := open(archive)
	if err != nil {
		return p, fmt.Errorf("read initramfs: %w", err)
	}
	return p, nil
}

func open(archive []byte) (p Parts, err error) {
	rest := withoutMicrocode(archive)
	p.microcode = archive[:len(archive)-len(rest)]
	length, err := frameLength(rest)
	if err != nil {
		return p, err
	}
	p.small, rest = rest[:length], bytes.TrimLeft(rest[length:], "\x00")
	if !bytes.HasPrefix(rest, []byte(cpioMagic)) {
		return p, errors.New("it has no root filesystem")
	}
	files, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(rest)))
	if err != nil {
		return p, err
	}
	for _, f := range files {
		if f.Name == RootFSName {
			p.RootFS = io.NewSectionReader(f, 0, int64(f.FileSize))
			return p, nil
		}
	}
	return p, errors.New("it has no " + RootFSName)
}

// Sizes in a frame of zstd (RFC 8878, 3.1.1).
const (
	blockHeader   = 3
	blockLast     = 1
	blockKind     = 3 // after a shift by 1
	blockRepeated = 1 // one byte, to be repeated
	sizeShift     = 3
	checksum      = 4
)

// frameLength is the number of bytes of the frame that content begins with.
func frameLength(content []byte) (int, error) {
	var h zstd.Header
	rest, err := h.DecodeAndStrip(content)
	if err != nil {
		return 0, err
	}
	for last := false; !last; {
		if len(rest) < blockHeader {
			return 0, io.ErrUnexpectedEOF
		}
		header := uint32(rest[0]) | uint32(rest[1])<<8 | uint32(rest[2])<<16
		size := int(header >> sizeShift)
		if header>>1&blockKind == blockRepeated {
			size = 1
		}
		if last = header&blockLast != 0; last && h.HasCheckSum {
			size += checksum
		}
		if len(rest) < blockHeader+size {
			return 0, io.ErrUnexpectedEOF
		}
		rest = rest[blockHeader+size:]
	}
	return len(content) - len(rest), nil
}

// Program is PID 1's.
func (p Parts) Program() ([]byte, error) {
	files, err := p.files()
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if f.Name == esp.InitName {
			return io.ReadAll(io.NewSectionReader(f, 0, int64(f.FileSize)))
		}
	}
	return nil, errors.New("the initramfs has no program " + esp.InitName)
}

// maxSmall is several times the size of what isn't in the root file system, in bytes.
const maxSmall = 1 << 29

func (p Parts) files() ([]cpio.Record, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxSmall))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	plain, err := d.DecodeAll(p.small, nil)
	if err != nil {
		return nil, err
	}
	return cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(plain)))
}

// SetModules replaces the modules by those of a module folder with a modules.dep.
func (p *Parts) SetModules(release string, dir func(name string) ([]byte, error)) error {
	program, err := p.Program()
	if err != nil {
		return err
	}
	records, err := smallFiles(program, release, dir)
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	if err := writeSegment(&archive, records); err != nil {
		return err
	}
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	if err != nil {
		return err
	}
	p.small = e.EncodeAll(archive.Bytes(), nil)
	return e.Close()
}

// Write writes an archive with another root filesystem.
func (p Parts) Write(w io.Writer, rootfs *os.File) error {
	if _, err := w.Write(p.microcode); err != nil {
		return err
	}
	return writeArchive(w, p.small, rootfs)
}
