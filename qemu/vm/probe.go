package vm

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// Program is the QEMU program for x86-64.
	Program = "qemu-system-x86_64"

	// probeBudget is for QEMU to start (0.1 s) and the guest to run (0.1 s),
	// tenfold for a busy machine. A KVM that hangs costs this at each `up`.
	probeBudget = 2 * time.Second
	// probePassed is QEMU's exit status when the guest writes 0x10 to
	// isa-debug-exit: (value << 1) | 1, in QEMU's hw/misc/debugexit.c.
	probePassed = 0x10<<1 | 1

	probeROMSize   = 64 << 10 // QEMU's minimum size of firmware
	probeResetAt   = probeROMSize - 16
	probeDebugPort = "0xf4"
)

//go:embed probe.bin
var probeCode []byte

// errNoKVM is the error of a machine without KVM, or with a KVM that runs no guests.
var errNoKVM = errors.New("no hardware virtualisation")

// ProbeKVM runs a guest of 222 bytes under KVM. It returns nil if the guest ran to its end.
// The device file proves nothing: on some hosts it can be opened, but no guest gets past
// 16-bit mode.
func ProbeKVM(ctx context.Context) error {
	kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoKVM, err)
	}
	kvm.Close()
	if err := probe(ctx, probeBudget, "kvm", "host"); err != nil {
		return fmt.Errorf("%w: /dev/kvm is there, but %w", errNoKVM, err)
	}
	return nil
}

// probe runs the guest with one of QEMU's accelerators.
func probe(ctx context.Context, budget time.Duration, accelerator, cpu string) error {
	dir, err := os.MkdirTemp("", "garboard-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	rom := filepath.Join(dir, "rom")
	if err := os.WriteFile(rom, probeROM(), 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	cmd := exec.CommandContext(ctx, Program,
		"-accel", accelerator, "-cpu", cpu, "-machine", "q35", "-m", "16",
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-bios", rom, "-device", "isa-debug-exit,iobase="+probeDebugPort+",iosize=4")
	// A guest that hangs inside the kernel needs some time to be killed.
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // this process handles Ctrl-C
	out, err := cmd.CombinedOutput()
	exit, _ := errors.AsType[*exec.ExitError](err)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("a guest of %d bytes didn't end within %s", len(probeCode), budget)
	case exit != nil && exit.ExitCode() == probePassed:
		return nil
	case err != nil:
		return fmt.Errorf("%s: %w: %s", Program, err, oneLine(string(out)))
	}
	return fmt.Errorf("a guest of %d bytes ended without a result", len(probeCode))
}

// oneLine joins the lines of a program's output: if KVM lacks a feature that it
// has announced, QEMU prints an error and a failed assertion.
func oneLine(said string) string {
	return strings.Join(strings.FieldsFunc(strings.TrimSpace(said), func(r rune) bool { return r == '\n' }), "; ")
}

// probeROM returns firmware that contains only the guest. The processor starts at the reset
// vector, 16 bytes below the end, with a jump to the start.
func probeROM() []byte {
	const hlt = 0xf4
	rom := make([]byte, probeROMSize)
	for i := range rom {
		rom[i] = hlt
	}
	copy(rom, probeCode)
	const jumpSize = 3
	distance := probeROMSize - (probeResetAt + jumpSize) // wraps around to 0 in 16 bits
	copy(rom[probeResetAt:], []byte{0xe9, byte(distance), byte(distance >> 8)})
	return rom
}
