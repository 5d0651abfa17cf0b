package esp

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The firmware has one entry, for the disk of this machine. It is the first one only where it is asked for.
func TestRegister(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name+global) }
	put := func(name, value string) {
		t.Helper()
		data, err := hex.DecodeString("07000000" + value)
		if err == nil {
			err = os.WriteFile(file(name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(step, name, value string) {
		t.Helper()
		data, err := os.ReadFile(file(name))
		if got := strings.TrimPrefix(hex.EncodeToString(data), "07000000"); err != nil || got != value {
			t.Errorf("%s: %s is\n%s, want\n%s (%v)", step, name, got, value, err)
		}
	}
	register := func(p Place, first bool) {
		t.Helper()
		if err := Register(dir, p, first); err != nil {
			t.Fatal(err)
		}
	}
	disk := Place{Number: 1, Start: 2048, Sectors: 0x100000, GUID: "01234567-89AB-CDEF-0123-456789ABCDEF"}
	const (
		other  = "01000000040043004400000004007fff0400" // an entry CD
		option = "01000000" + "5e00" + "47006100720062006f006100720064000000" +
			"04012a00" + "01000000" + "0008000000000000" + "0000100000000000" + "67452301ab89efcd0123456789abcdef" + "0202" +
			"04043000" + "5c004500460049005c0042004f004f0054005c0042004f004f0054005800360034002e004500460049000000" + "7fff0400"
	)
	put("Boot0000", other)
	put("BootOrder", "00000300")

	register(disk, true)
	want("first", "Boot0001", option)
	want("first", "BootOrder", "010000000300")

	put("BootOrder", "000001000300") // a user has changed it
	register(disk, false)
	want("it is there", "BootOrder", "000001000300")

	// The firmware has forgotten the order.
	put("BootOrder", "0000")
	register(disk, false)
	want("mended", "BootOrder", "01000000")

	// Another disk is the system disk now.
	disk.GUID = "FFFFFFFF-89AB-CDEF-0123-456789ABCDEF"
	register(disk, true)
	want("another disk", "Boot0001", strings.Replace(option, "67452301", "ffffffff", 1))
	want("another disk", "BootOrder", "01000000")
	want("another disk", "Boot0000", other)
	if err := Register(filepath.Join(dir, "none"), disk, true); err != nil {
		t.Errorf("a BIOS: %v", err)
	}
}

// The boot loader's variable is text in UTF-16; what isn't there, or is no text, names no partition.
func TestStartedFrom(t *testing.T) {
	t.Parallel()
	const guid = "0a1b2c3d-89ab-cdef-0123-456789abcdef"
	var value []byte
	for _, c := range guid + "\x00" {
		value = append(value, byte(c), 0)
	}
	for want, content := range map[string][]byte{guid: append([]byte("\x06\x00\x00\x00"), value...), "": []byte("\x06\x00")} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, loaderPartition), content, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := StartedFrom(dir); got != want {
			t.Errorf("%q: %q, want %q", content, got, want)
		}
	}
	if got := StartedFrom(t.TempDir()); got != "" {
		t.Errorf("a BIOS: %q", got)
	}
}
