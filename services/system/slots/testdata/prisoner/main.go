// Command prisoner is a system's program that tries to get out of its jail, and reports what it got.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// Report is what it got.
type Report struct {
	UID, GID, PID, Parent int
	Groups                []int
	Env                   []string
	Descriptors           []int
	Got                   []string // what shouldn't work, and did
	Input                 string
	Slot                  string
}

func main() {
	r := Report{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid(), Parent: os.Getppid(), Env: os.Environ()}
	r.Groups, _ = os.Getgroups()
	for fd := range 1024 {
		var st syscall.Stat_t
		if syscall.Fstat(fd, &st) == nil && (st.Mode&syscall.S_IFMT != 0) { // those of Go's runtime have no type
			r.Descriptors = append(r.Descriptors, fd)
		}
	}
	try := func(what string, err error) {
		if err == nil {
			r.Got = append(r.Got, what)
		}
	}
	for _, path := range []string{"/etc/passwd", "/proc/self/status", "/proc/1/root", "/dev/null", "/sys", "/usr", "../../etc/passwd", "../etc", "/3/../../etc", "/self"} {
		f, err := os.Open(path)
		if try("open "+path, err); err == nil {
			f.Close()
		}
	}
	try("make a file", os.WriteFile("/mine", nil, 0o600))
	try("make a directory", os.Mkdir("/mine", 0o700))
	try("make a device", syscall.Mknod("/mine", syscall.S_IFBLK|0o600, 7<<8))
	try("mount", syscall.Mount("proc", "/", "proc", 0, ""))
	try("leave the root", syscall.Chroot("/"))
	try("become root", syscall.Setuid(0))
	try("have other namespaces", syscall.Unshare(syscall.CLONE_NEWNS))
	try("set the name of the host", syscall.Sethostname([]byte("mine")))
	try("kill all", syscall.Kill(-1, syscall.SIGKILL))
	try("trace a process", syscall.PtraceAttach(4242))
	try("restart the machine", syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART))
	_, err := net.Dial("tcp", os.Args[len(os.Args)-1])
	try("dial "+os.Args[len(os.Args)-1], err)
	_, err = net.Dial("tcp", "127.0.0.1:9")
	try("dial", err)
	in, err := io.ReadAll(os.Stdin)
	r.Input = fmt.Sprint(string(in), err)
	slot := os.NewFile(3, "slot")
	_, err = slot.WriteString("a system")
	if err == nil {
		err = slot.Sync()
	}
	r.Slot = fmt.Sprint(err)
	fmt.Fprintln(os.Stderr, "last words")
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		os.Exit(3)
	}
}
