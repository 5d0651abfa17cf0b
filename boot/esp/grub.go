package esp

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

const (
	entryCfg       = ".cfg"
	variableChoice = "choice"
	variableTrying = "trying"
	// environmentSize is the size of GRUB's environment block (GRUB manual, "The GRUB environment block").
	environmentSize = 1024
)

// grubScript starts a trying system once, and then the chosen one. If a system can't be loaded, the other one is
// started.
//
//go:embed grub.cfg
var grubScript string

// environmentBlock is the content of the file.
func environmentBlock(choice, trying string) []byte {
	text := "# GRUB Environment Block\n"
	for _, v := range [][2]string{{variableChoice, choice}, {variableTrying, trying}} {
		text += v[0] + "=" + v[1] + "\n"
	}
	return []byte(text + strings.Repeat("#", environmentSize-len(text)))
}

// startBIOS writes the script that starts a slot.
func (p Partition) startBIOS(name, version, line string) error {
	image, err := readImageFile(p.System(name))
	if err != nil {
		return err
	}
	script := fmt.Sprintf(`loopback system /%s/%s.efi
echo "Garboard %s (slot %s): loading the system"
linux (system)%s %s
initrd (system)%s
boot
`, systemsDir, name, version, name, image.Kernel, Quoted(line), image.Initramfs)
	return p.put([]byte(script), grubDir, name+entryCfg)
}

func readImageFile(path string) (Image, error) {
	file, err := os.Open(path)
	if err != nil {
		return Image{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return Image{}, err
	}
	return ReadImage(file, info.Size())
}

// Quoted protects the characters of kernel arguments that GRUB's scripts would replace (GRUB manual, "Quoting").
func Quoted(line string) string {
	args := strings.Split(line, " ")
	for i, arg := range args {
		if strings.ContainsAny(arg, "${}|&;<>'\"\\") {
			args[i] = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
		}
	}
	return strings.Join(args, " ")
}

// Places in GRUB's images (grub-core/boot/i386/pc/boot.S and diskboot.S). Addresses are in sectors of 512 bytes.
const (
	recordCode    = 440   // bytes of the boot record before the disk's signature
	recordAddress = 0x5c  // where the program begins
	driveCheck    = 0x66  // a jump over the workaround for BIOSes that give a wrong number of the disk
	listAddress   = 0x1f4 // in the program's first sector: where its rest begins
)

// Device is a disk.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// activeAt is the second entry of a boot record's partition table.
const activeAt = 446 + 16

// active is an empty entry that is active.
var active = []byte{0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}

// Activate makes a BIOS start a disk that starts none without an active partition. UEFI allows no other entry than the
// protective one to be in use, so the active one is empty (the same as xorriso's --mbr-force-bootable).
func Activate(disk Device) error {
	have := make([]byte, len(active))
	if _, err := disk.ReadAt(have, activeAt); err != nil || bytes.Equal(have, active) {
		return err
	}
	_, err := disk.WriteAt(active, activeAt)
	return err
}

// BootRecord makes a BIOS start GRUB from a disk: its program goes to a partition of its own, and the boot record,
// which is one sector, starts it. Each half of the partition has room for a program: the one that the boot record
// starts isn't touched. The GPT is left alone.
func BootRecord(disk Device, record, program []byte, start, size int64) error {
	half := size / 2 &^ (block - 1)
	switch {
	case len(record) < recordCode || len(program) < 2*block:
		return errors.New("GRUB's images are too short")
	case int64(len(program)) > half:
		return fmt.Errorf("GRUB has %d bytes, and half of its partition %d", len(program), half)
	}
	if err := errors.Join(Activate(disk), disk.Sync()); err != nil {
		return err
	}
	now := make([]byte, recordCode)
	if _, err := disk.ReadAt(now, 0); err != nil {
		return err
	}
	for _, at := range []int64{start, start + half} {
		code, want := started(record, program, at)
		have := make([]byte, len(want))
		if _, err := disk.ReadAt(have, at); err != nil {
			return err
		}
		if string(have) == string(want) && string(now) == string(code) {
			return nil
		}
	}
	at := start
	if binary.LittleEndian.Uint64(now[recordAddress:]) == uint64(start/block) {
		at += half
	}
	code, program := started(record, program, at)
	if _, err := disk.WriteAt(program, at); err != nil {
		return err
	}
	if err := disk.Sync(); err != nil {
		return err
	}
	if _, err := disk.WriteAt(code, 0); err != nil {
		return err
	}
	return disk.Sync()
}

// started are the boot record and the program for a place of the program on the disk.
func started(record, program []byte, at int64) (code, placed []byte) {
	first := uint64(at / block)
	code, placed = bytes.Clone(record[:recordCode]), bytes.Clone(program)
	binary.LittleEndian.PutUint64(placed[listAddress:], first+1)
	binary.LittleEndian.PutUint64(code[recordAddress:], first)
	code[driveCheck], code[driveCheck+1] = 0x90, 0x90 // no operation
	return code, placed
}
