package uml

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// The files that Keep inherits, and hands on to the kernel.
const (
	lineFile   = 3 // the serial line
	kernelFile = 4 // the kernel itself
)

// commandLine is the kernel's: the host's root as the guest's, the first serial line to the
// wrapper, the kernel's messages to standard output.
func commandLine(self string) []string {
	return []string{
		// What isn't used takes no memory of the host: it is a sparse file without a name.
		"mem=" + memorySize,
		"rootfstype=hostfs", "rootflags=/", "ro",
		"con=null", fmt.Sprintf("con0=null,fd:%d", unix.Stdout), "console=tty0",
		"ssl=null", fmt.Sprintf("ssl0=fd:%d", lineFile),
		// The directory for the socket of uml_mconsole: there is none to be left behind.
		"uml_dir=/dev/null/",
		// An error in the kernel is to end the guest, with its message.
		"oops=panic",
		"init=" + self, "--", InitCommand,
	}
}

// memorySize is what the tests of disks need: tmpfs holds their disks.
const memorySize = "4096M"

// Keep runs the kernel as the first process of a PID namespace, and returns its exit status.
// The kernel's processes on the host, one for each address space of the guest, outlive the
// kernel when it is killed, and would go on as the host's own ones. The namespace ends with
// this process, and they with it.
func Keep(args []string) (int, error) {
	if len(args) != 2 || os.Getpid() != 1 {
		return 1, fmt.Errorf("%s %q: the wrapper calls it, in a PID namespace", KeepCommand, args)
	}
	self, number := args[0], args[1]
	processor, err := strconv.Atoi(number)
	if err != nil {
		return 1, err
	}
	runtime.LockOSThread() // the affinity is the thread's, and inherited
	var one unix.CPUSet
	one.Set(processor)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return 1, fmt.Errorf("sched_setaffinity %d: %w", processor, err)
	}
	cmd := exec.Command(fmt.Sprintf("/proc/self/fd/%d", kernelFile), commandLine(self)...)
	// The environment would be read as parameters: UML looks for a directory in TMPDIR.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(lineFile, "line"), os.NewFile(kernelFile, program)}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, exit)
		return 1, nil
	}
	return 0, err
}
