//go:build linux

package esp

import (
	"fmt"
	"io"

	"github.com/garboard-os/garboard/boot/authenticode"
)

// Variables of UEFI (UEFI 2.10, 3.3 and 32.6.1).
const (
	secureBoot = "SecureBoot" + global
	setupMode  = "SetupMode" + global
	security   = "-d719b2cb-3d3a-4596-a3bc-dad00e67656f"
)

// States of Secure Boot.
const (
	SecureOn    = "on"
	SecureOff   = "off"
	SecureSetup = "setup mode" // it is off, and the firmware takes keys from anybody
	SecureNone  = "no UEFI"
)

// SecureBoot is what a firmware says about it. Only the value SecureOn, of a firmware that isn't lying, protects.
func SecureBoot(dir string) string {
	is := func(name string) bool {
		value, err := Value(dir, name)
		return err == nil && len(value) == 1 && value[0] == 1
	}
	switch _, err := Value(dir, "BootCurrent"+global); {
	case is(secureBoot):
		return SecureOn
	case is(setupMode):
		return SecureSetup
	case err == nil:
		return SecureOff
	}
	return SecureNone
}

// Accepts returns who has signed a program that the firmware starts, or why it doesn't. Without Secure Boot, it starts
// all.
func Accepts(dir string, program io.ReaderAt, size int64) (signer string, err error) {
	image, err := authenticode.Read(program, size)
	if err != nil {
		return "", err
	}
	if SecureBoot(dir) != SecureOn {
		return image.Signer(), nil
	}
	var known [2]authenticode.Database
	for n, name := range []string{"db", "dbx"} {
		value, err := Value(dir, name+security)
		if err == nil {
			known[n], err = authenticode.ParseDatabase(value)
		}
		if err != nil && (n == 0 || value != nil) { // dbx may not be there
			return "", fmt.Errorf("the firmware's %s: %w", name, err)
		}
	}
	return authenticode.Accept(image, known[0], known[1])
}
