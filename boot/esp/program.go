package esp

import (
	"bufio"
	"bytes"
	"debug/pe"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/klauspost/compress/zstd"
)

// The initramfs is a sequence of archives, each compressed or not, with zeros between them
// (Documentation/driver-api/early-userspace/buffer-format.rst).
const (
	archiveMagic = "070701"
	zstdMagic    = "\x28\xb5\x2f\xfd"
	trailer      = "TRAILER!!!"

	headerSize = 110 // of a file in an archive: the magic number, and 13 numbers of 8 hexadecimal digits
	sizeField  = 6
	nameField  = 11
	maxName    = 4096
)

// Program opens PID 1's program in a unified kernel image.
func Program(r io.ReaderAt, size int64) (io.ReadCloser, error) {
	file, err := pe.NewFile(io.NewSectionReader(r, 0, size))
	if err != nil {
		return nil, err
	}
	section := file.Section(SectionInitramfs)
	if section == nil {
		return nil, errors.New("the image has no initramfs")
	}
	in := bufio.NewReaderSize(section.Open(), 1<<20)
	for {
		start, err := in.Peek(len(zstdMagic))
		if err != nil {
			return nil, fmt.Errorf("the initramfs has no program %s: %w", InitName, err)
		}
		switch {
		case start[0] == 0:
			_, _ = in.Discard(1) // it was peeked at
		case bytes.Equal(start, []byte(zstdMagic)):
			archive, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1))
			if err != nil {
				return nil, err
			}
			content, err := find(archive)
			if err != nil {
				archive.Close()
				return nil, fmt.Errorf("the initramfs has no program %s: %w", InitName, err)
			}
			return struct {
				io.Reader
				io.Closer
			}{content, archive.IOReadCloser()}, nil
		default:
			if content, err := find(in); !errors.Is(err, io.EOF) {
				return io.NopCloser(content), err
			}
		}
	}
}

// find reads an archive up to the program. The error is io.EOF if it isn't there.
func find(archive io.Reader) (io.Reader, error) {
	for {
		header := make([]byte, headerSize)
		if _, err := io.ReadFull(archive, header); err != nil {
			return nil, err
		}
		number := func(field int) int64 {
			at := len(archiveMagic) + 8*field
			n, err := strconv.ParseInt(string(header[at:at+8]), 16, 64)
			if err != nil {
				return -1
			}
			return n
		}
		size, length := number(sizeField), number(nameField)
		if string(header[:len(archiveMagic)]) != archiveMagic || size < 0 || length < 1 || length > maxName {
			return nil, errors.New("it is no archive")
		}
		name := make([]byte, padded(headerSize+length)-headerSize)
		if _, err := io.ReadFull(archive, name); err != nil {
			return nil, err
		}
		switch string(name[:length-1]) {
		case InitName:
			return io.LimitReader(archive, size), nil
		case trailer:
			return nil, io.EOF
		}
		if _, err := io.CopyN(io.Discard, archive, padded(size)); err != nil {
			return nil, err
		}
	}
}

func padded(n int64) int64 { return (n + 3) &^ 3 }
