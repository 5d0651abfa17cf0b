//go:build e2e

package e2etest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/qemu/vm"
)

// SerialArgs are the kernel arguments of media: the serial line is the main console, as in the other tests. Most
// machines that run these are emulated.
func SerialArgs() []string {
	return append([]string{"console=ttyS0", "panic=-1"}, vm.KernelArgs("tcg")...)
}

// WrapQEMU changes arguments of QEMU, for each machine that the test starts: cases are those of a shell's case
// statement, which change $a.
func WrapQEMU(t *testing.T, before, cases string) {
	t.Helper()
	program, err := exec.LookPath(vm.Program)
	if err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\n" + before + "\nfor a; do\n  shift\n  case $a in" + cases + "\n  esac\n  set -- \"$@\" \"$a\"\ndone\nexec " + program + " \"$@\"\n"
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, vm.Program), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
}

const (
	// recordedWrites is in the names of the files with the writes to a disk, one for each time that the machine was
	// started. They are beside it.
	recordedWrites = ".writes."
	recordsVar     = "GARBOARD_E2E_RECORDS"
)

// RecordWrites makes QEMU record the writes to the disk of each machine that the test starts, in the order in which the
// machine makes them. Merged requests have too many parts for that. The format is that of the kernel's dm-log-writes
// (Documentation/admin-guide/device-mapper/log-writes.rst).
func RecordWrites(t *testing.T) {
	t.Helper()
	if os.Getenv(recordsVar) != "" {
		return // a second wrapper would change what the first one has changed
	}
	t.Setenv(recordsVar, "1")
	WrapQEMU(t, "", fmt.Sprintf(`
  if=none,id=disk,*)
    disk=${a##*file=}
    log=$disk%[1]s$(printf %%03d "$(ls "$disk"%[1]s* 2>/dev/null | wc -l)")
    : >"$log"
    a="if=none,id=disk,driver=blklogwrites,discard=unmap,file.driver=file,file.filename=$disk,log.driver=file,log.filename=$log" ;;
  *,drive=disk*) a="$a,request-merging=off" ;;`, recordedWrites))
}

// RecordedWrites are the files with the writes to a machine's disk, in the order in which they were made.
func RecordedWrites(t *testing.T, disk string) []string {
	t.Helper()
	files, err := filepath.Glob(disk + recordedWrites + "*")
	if err != nil || len(files) == 0 {
		t.Fatalf("no writes to %s are recorded: %v", disk, err)
	}
	return files
}
