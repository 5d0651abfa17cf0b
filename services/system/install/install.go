// Package install is the program that writes a system to a slot. It is in the program of PID 1, and each system is
// written by its own: a release can change what it writes, and how.
//
//	running release: slots.Write ── request, system ─▶ the new system's program ─▶ file in the EFI system partition
//	       META, boot entries ◀── reports, result ─────┘
package install

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"golang.org/x/sys/unix"
)

// Command is the argument of PID 1's program with which it is this one. Standard input is a line with the request, and
// then the system; standard output gets reports.
const Command = "write-system"

// Descriptor is the file of the slot.
const Descriptor = 3

// Request is what is to be written. Later releases read those of earlier ones: fields are only added.
type Request struct {
	// File is the one of the slot, in the EFI system partition, which is mounted; "": it is open as Descriptor.
	File   string `json:"file,omitempty"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Running are the kernel arguments of the running system, and Args those that the configuration adds.
	Running []string `json:"running,omitempty"`
	Args    []string `json:"args,omitempty"`
}

// Report is one line of the output. The last one has the version and the kernel arguments of the system, or the error.
type Report struct {
	Done    int64    `json:"done,omitempty"` // bytes that are written
	Version string   `json:"version,omitempty"`
	Args    []string `json:"args,omitempty"`
	Error   string   `json:"error,omitempty"`
}

// Main is the program. slot is Descriptor, which earlier releases don't open.
func Main(ctx context.Context, in io.Reader, out io.Writer, slot *os.File) (status int) {
	lines := json.NewEncoder(out)
	report := func(r Report) { _ = lines.Encode(r) } // without a reader, there is nobody to wait for
	system := bufio.NewReader(in)
	line, err := system.ReadBytes('\n')
	var request Request
	if err == nil {
		err = json.Unmarshal(line, &request)
	}
	if err != nil {
		report(Report{Error: "the request can't be read: " + err.Error()})
		return 1
	}
	result, err := Write(ctx, request, system, slot, func(done int64) { report(Report{Done: done}) })
	if err != nil {
		report(Report{Error: err.Error()})
		return 1
	}
	report(result)
	return 0
}

// Write writes the system, and reads it back from the disk.
func Write(ctx context.Context, r Request, system io.Reader, file *os.File, report func(done int64)) (result Report, err error) {
	if r.File != "" {
		if file, err = os.OpenFile(r.File, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
			return result, err
		}
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var room unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &room); err != nil {
		return result, err
	}
	if free := int64(room.Bavail) * room.Bsize; free < r.Size {
		return result, fmt.Errorf("the system has %d bytes, and the EFI system partition has %d left", r.Size, free)
	}
	if err := Check(ctx, r.SHA256, system, file, report); err != nil {
		return result, err
	}
	if err := file.Sync(); err != nil {
		return result, err
	}
	// What is in memory is forgotten, so that what the disk has is read.
	if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return result, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return result, err
	}
	if err := Check(ctx, r.SHA256, file, io.Discard, nil); err != nil {
		return result, fmt.Errorf("the disk doesn't keep what is written to it: %w", err)
	}
	image, err := esp.ReadImage(file, r.Size)
	return Report{Version: image.Version, Args: r.arguments(image)}, err
}

// Check copies a system, and compares its hash.
func Check(ctx context.Context, want string, from io.Reader, to io.Writer, report func(done int64)) error {
	sum := sha256.New()
	buffer := make([]byte, 1<<20)
	for done := int64(0); ; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := io.ReadFull(from, buffer)
		sum.Write(buffer[:n]) // never fails (hash.Hash)
		if _, err := to.Write(buffer[:n]); err != nil {
			return err
		}
		if done += int64(n); report != nil {
			report(done)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("its system has the SHA-256 %.16s…, and should have %.16s…", got, want)
	}
	return nil
}

// arguments are the kernel arguments of an image: its own, those that describe this machine, and those of the
// configuration.
func (r Request) arguments(image esp.Image) (args []string) {
	add := func(arg string) {
		if !slices.Contains(args, arg) {
			args = append(args, arg)
		}
	}
	for _, p := range boot.ParseCmdline(image.Cmdline).Params {
		if p.String() != boot.ISOArgument {
			args = append(args, p.String())
		}
	}
	args = boot.Yield(args, r.Args)
	// The system of a medium has the configuration of the medium, and that of a slot the one that is on the same disk.
	fromMedium := !slices.ContainsFunc(r.Running, func(arg string) bool { return strings.HasPrefix(arg, boot.ParamSlot+"=") })
	for _, arg := range r.Running {
		if key, _, _ := strings.Cut(arg, "="); strings.HasPrefix(key, "garboard.") && key != boot.ParamSlot && key != boot.ParamTrial && (arg != boot.ISOArgument || !fromMedium) {
			add(arg)
		}
	}
	for _, arg := range r.Args {
		add(arg)
	}
	return args
}
