package vm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// run starts QEMU with a guest of a few bytes of 16-bit code as its firmware.
func run(t *testing.T, thread *osthread.Thread, code ...byte) *Running {
	t.Helper()
	image := make([]byte, probeROMSize)
	copy(image[probeResetAt:], code)
	rom := filepath.Join(t.TempDir(), "rom")
	if err := os.WriteFile(rom, image, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := launch(t.Context(), thread, append([]string{
		"-accel", "tcg", "-machine", "q35", "-m", "16", "-nodefaults", "-no-user-config", "-no-reboot",
		"-display", "none", "-bios", rom,
	}, monitorArguments()...))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var (
	idle = []byte{0xfa, 0xf4, 0xeb, 0xfd} // cli; hlt; jmp to hlt
	// reset writes 6 to the reset control register of the chipset, port 0xcf9.
	reset = []byte{0xba, 0xf9, 0x0c, 0xb0, 0x06, 0xee, 0xf4}
)

func TestMachineEnds(t *testing.T) {
	t.Parallel()
	thread := osthread.New()
	defer thread.Close()
	for _, tc := range []struct {
		name string
		code []byte
		do   func(*Running)
		want exit.Reason
	}{
		{"guest resets", reset, func(*Running) {}, exit.Reboot},
		{"power is cut", idle, (*Running).Cut, exit.Killed},
		{"QEMU quits", idle, func(r *Running) { _ = r.monitor.Do(context.Background(), "quit") }, exit.Off},
		{"frozen, then cut", idle, func(r *Running) {
			if err := r.Freeze(t.Context(), true); err != nil {
				t.Error(err)
			}
			r.Cut()
		}, exit.Killed},
	} {
		r := run(t, thread, tc.code...)
		tc.do(r)
		if end, err := r.Wait(); end != tc.want || err != nil {
			t.Errorf("%s: ended as %q, %v; want %q", tc.name, end, err, tc.want)
		}
	}
}

// A machine ends with the thread that started it, also when the process is killed.
func TestMachineEndsWithTheThread(t *testing.T) {
	t.Parallel()
	thread := osthread.New()
	r := run(t, thread, idle...)
	if err := thread.Close(); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 5*time.Second, "QEMU is gone", func() error {
		if err := syscall.Kill(r.cmd.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
			return errors.New("it runs")
		}
		return nil
	})
}

func TestMachineWithoutFirmwareFails(t *testing.T) {
	t.Parallel()
	thread := osthread.New()
	defer thread.Close()
	_, err := launch(t.Context(), thread, append([]string{"-bios", "/nowhere"}, monitorArguments()...))
	if err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("launch: %v", err)
	}
}
