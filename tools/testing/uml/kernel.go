package uml

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// program is the guest's kernel, from Debian's package user-mode-linux.
const program = "linux.uml"

// openKernel returns the kernel as a file in memory that can be executed.
func openKernel() (*os.File, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w; install Debian's package user-mode-linux: apt-get install --no-install-recommends user-mode-linux", program, err)
	}
	code, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return memory(program, roomForRegisters(code))
}

// memory is a file without a name, which needs nobody to remove it.
func memory(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(content); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

const (
	// registersBefore is the size of a processor's extended registers that UML 6.1 knows
	// (HOST_FP_SIZE in arch/x86/um/user-offsets.c: AVX-512, not AMX).
	registersBefore = 2696
	// registersNow has room for AMX, which takes 11 KB. Linux cuts it to what it has.
	registersNow = 16 << 10
)

// roomForRegisters makes UML 6.1 run on processors with AMX. Linux takes back a process's
// registers in their full size only (xstateregs_set in arch/x86/kernel/fpu/regset.c), and
// UML 6.1 passes on a fixed one, so that its first process dies. Kernels since 6.13 ask for
// the size. The longer buffer has more of UML's memory behind the registers, which Linux
// doesn't look at: the registers say which of their parts are in use, and AMX isn't.
//
// The one place that is changed is the length in put_fp_registers, known by the two
// instructions that set it and name the request. A kernel without it is left as it is.
func roomForRegisters(code []byte) []byte {
	at := func(size uint32) []byte {
		length := binary.LittleEndian.AppendUint32([]byte{0x48, 0xc7, 0x45, 0xf8}, size) // movq $size,-8(%rbp)
		return binary.LittleEndian.AppendUint32(append(length, 0xbf), unix.PTRACE_SETREGSET)
	}
	if bytes.Count(code, at(registersBefore)) != 1 {
		return code
	}
	return bytes.Replace(code, at(registersBefore), at(registersNow), 1)
}

// takeProcessor chooses the one that the guest is pinned to: each stop of a guest's process
// is a hand-over between processes of the host, and across processors that costs two to
// three times as much. It is nobody else's until the returned value is closed; where all
// are taken, one is shared. A socket in the abstract namespace (unix(7)) is the lock: it
// ends with its owner and leaves no file.
func takeProcessor() (number int, lock io.Closer, err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return 0, nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	var mine []int
	for n := range len(all) * 64 {
		if all.IsSet(n) {
			mine = append(mine, n)
		}
	}
	// The highest first: interrupts, and what isn't pinned, often are at the lowest.
	for i := len(mine) - 1; i >= 0; i-- {
		l, err := net.Listen("unix", fmt.Sprintf("@garboard-uml-processor-%d", mine[i]))
		if err == nil {
			return mine[i], l, nil
		}
	}
	return mine[rand.IntN(len(mine))], io.NopCloser(nil), nil
}
