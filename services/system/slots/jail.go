package slots

import (
	"context"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/garboard-os/garboard/services/system/install"
	"golang.org/x/sys/unix"
)

// vouched reads a program to its end, and has an error there if the program isn't the one that was signed.
type vouched struct {
	from io.Reader
	sum  hash.Hash
	want string
}

// Read implements io.Reader.
func (v *vouched) Read(to []byte) (int, error) {
	n, err := v.from.Read(to)
	v.sum.Write(to[:n]) // never fails (hash.Hash)
	if err == io.EOF {
		if got := hex.EncodeToString(v.sum.Sum(nil)); got != v.want {
			return n, fmt.Errorf("its program has the SHA-256 %.16s…, and the one that was signed has %.16s…", got, v.want)
		}
	}
	return n, err
}

// jailUser is the user and the group of another system's program (image/rootfs has its name). Nothing belongs to it.
const jailUser = 52

// seals keep what was checked as it is until it runs.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// jailed runs the program of another system out of memory, with four descriptors and nothing else: the request with the
// system, the reports, what it has to say, and the file of the slot. Its user has no rights. Its root is the directory
// of its own descriptors: so it has no path, not even one to itself. It has namespaces of its own, with no process,
// network or mount that is ours.
func (o Options) jailed(ctx context.Context, program, in io.Reader, out io.Writer, slot *os.File) error {
	fd, err := unix.MemfdCreate("system", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memory for the program: %w", err)
	}
	file := os.NewFile(uintptr(fd), "system")
	defer file.Close()
	if _, err := io.Copy(file, program); err != nil {
		return err
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal the program: %w", err)
	}
	cmd := exec.Command(fmt.Sprintf("/%d", fd), install.Command)
	cmd.Stdin, cmd.Stdout, cmd.ExtraFiles, cmd.Env, cmd.Dir = in, out, []*os.File{slot}, []string{}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     "/proc/self/fd",
		Credential: &syscall.Credential{Uid: jailUser, Gid: jailUser},
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
	}
	return o.Processes.Run(ctx, cmd)
}
