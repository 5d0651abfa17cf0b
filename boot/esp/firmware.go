//go:build linux

package esp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf16"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"golang.org/x/sys/unix"
)

// FirmwareDir has the variables of UEFI (Linux, Documentation/filesystems/efivarfs.rst). A machine with a BIOS has
// none.
const FirmwareDir = "/sys/firmware/efi/efivars"

const (
	entryName = "Garboard"
	// loaderPartition is set by systemd's boot loader and stub (systemd, "Boot Loader Interface").
	loaderPartition = "LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
	loaderEntry     = "LoaderEntrySelected-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
	global          = "-8be4df61-93ca-11d2-aa0d-00e098032b8c" // UEFI 2.10, 3.3
	// attributes before the value of a variable: NON_VOLATILE, BOOTSERVICE_ACCESS, RUNTIME_ACCESS.
	attributes = "\x07\x00\x00\x00"
)

// Place is where the EFI system partition is.
type Place struct {
	Number         uint32
	Start, Sectors uint64
	GUID           string // of the partition
}

// option is the EFI_LOAD_OPTION of the boot loader in the partition (UEFI 2.10, 3.1.3; its path: 10.3.5.1 and
// 10.3.5.4).
func (p Place) option() []byte {
	guid, _ := hex.DecodeString(strings.ReplaceAll(p.GUID, "-", "")) // a wrong one starts nothing
	for _, swapped := range [][2]int{{0, 4}, {4, 6}, {6, 8}} {
		slices.Reverse(guid[min(swapped[0], len(guid)):min(swapped[1], len(guid))])
	}
	file := utf16le(`\` + strings.ReplaceAll(removable, "/", `\`))
	path := slices.Concat([]byte{4, 1, 42, 0}, number(p.Number), number(p.Start), number(p.Sectors), guid, []byte{2, 2},
		[]byte{4, 4, byte(4 + len(file)), 0}, file, []byte{0x7f, 0xff, 4, 0})
	return slices.Concat(number(uint32(1)), number(uint16(len(path))), utf16le(entryName), path)
}

func number(value any) []byte {
	data, _ := binary.Append(nil, binary.LittleEndian, value) // numbers never fail
	return data
}

func utf16le(s string) []byte { return number(utf16.Encode([]rune(s + "\x00"))) }

// Register makes the firmware start the partition: the entry of this name is for this disk. With first, it is tried
// before all others. Without, an order that has it stays as it is: the user of the machine may have made it.
func Register(dir string, p Place, first bool) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	path := func(entry int) string { return filepath.Join(dir, fmt.Sprintf("Boot%04X%s", entry, global)) }
	entry, free := -1, -1
	for n := range 0x100 { // firmware has few, and counts from 0
		switch have, err := os.ReadFile(path(n)); {
		case err != nil && free < 0:
			free = n
		case len(have) > 10 && bytes.HasPrefix(have[10:], utf16le(entryName)):
			entry = n
		}
	}
	if entry < 0 {
		entry = free
	}
	if err := write(path(entry), p.option()); err != nil {
		return err
	}
	order := filepath.Join(dir, "BootOrder"+global)
	data, err := os.ReadFile(order)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	numbers := words(data)
	if at := slices.Index(numbers, uint16(entry)); at < 0 || first {
		numbers = append([]uint16{uint16(entry)}, slices.DeleteFunc(numbers, func(n uint16) bool { return int(n) == entry })...)
	}
	return write(order, number(numbers))
}

// words is the value of a variable that consists of 16-bit numbers.
func words(variable []byte) []uint16 {
	value := variable[min(len(attributes), len(variable)):]
	numbers := make([]uint16, len(value)/2)
	_, _ = binary.Decode(value, binary.LittleEndian, numbers) // it is as long
	return numbers
}

// StartedFrom is the GUID of the partition that this machine was started from; "" if no boot loader has named one: a
// BIOS has started it, or it was started from the network, from a CD, or from a disk without a GPT.
func StartedFrom(dir string) string {
	return Variable(dir, loaderPartition)
}

// Selected is what the boot loader says of the slot that it has started, as parameters of the kernel; nil: it says
// nothing. The slot is trying if the name of its entry says so. Whoever can write to the EFI system partition can say
// anything: nothing is trusted because of it.
func Selected(dir string) (params []boot.Param) {
	id, _, _ := strings.Cut(strings.TrimPrefix(strings.ToLower(Variable(dir, loaderEntry)), entryPrefix), entrySuffix)
	slot, kind, _ := strings.Cut(id, "-")
	if slot = strings.ToUpper(slot); !slices.Contains(boot.SlotNames[:], slot) {
		return nil
	}
	params = append(params, boot.Param{Key: boot.ParamSlot, Value: slot})
	switch kind {
	case once:
		params = append(params, boot.Param{Key: boot.ParamTrial})
	case boot.TrialAlone, boot.TrialBack:
		params = append(params, boot.Param{Key: boot.ParamTrial, Value: kind})
	}
	return params
}

const (
	// maxVariable bounds the value of a variable, in bytes: db and dbx have some ten thousand.
	maxVariable = 1 << 20
	// variableBudget is for a firmware to answer, which may do so in the system management mode of a slow processor.
	variableBudget = 10 * time.Second
)

// Value is that of a variable, without its attributes. A firmware that doesn't answer in time has none.
func Value(dir, name string) ([]byte, error) {
	type answer struct {
		data []byte
		err  error
	}
	read := make(chan answer, 1)
	go func() {
		data, err := untrusted.ReadFile(filepath.Join(dir, name), maxVariable)
		read <- answer{data, err}
	}()
	select {
	case a := <-read:
		return a.data[min(len(attributes), len(a.data)):], a.err
	case <-time.After(variableBudget):
		return nil, fmt.Errorf("the firmware doesn't answer for its variable %s", name)
	}
}

// Variable is the text of a variable of the boot loader; "": there is none.
func Variable(dir, name string) string {
	data, _ := Value(dir, name)
	return strings.TrimRight(string(utf16.Decode(words(append([]byte(attributes), data...)))), "\x00")
}

// write sets a variable by one call of write(2), unless it has the value. The kernel protects variables from rm by a
// flag.
func write(path string, value []byte) error {
	value = append([]byte(attributes), value...)
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, value) {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY, 0)
	if err == nil {
		_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0) // if it fails, writing does
		f.Close()
	}
	if f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, fileMode); err != nil {
		return err
	}
	_, err = f.Write(value)
	return errors.Join(err, f.Close())
}
