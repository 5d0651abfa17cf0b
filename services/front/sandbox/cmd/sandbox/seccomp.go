package main

import (
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// serviceCalls are the system calls of a server that is written in Go: all others
// don't exist for it. That is far stricter than the usual profile for containers,
// as there is one program, which is ours: no ioctl, no prctl, no processes, no
// signals to others, no keyrings, no namespaces, no mounts, no tracing.
//
// The call that is refused fails with ENOSYS, as on a kernel that is too old for
// it: a newer Go runtime then does what it does on old kernels.
var serviceCalls = strings.Fields(`
	brk madvise mincore mmap mprotect mremap munmap
	exit exit_group futex gettid getpid getppid tgkill sched_getaffinity sched_yield set_robust_list set_tid_address arch_prctl rseq restart_syscall
	rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
	clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday setitimer timer_create timer_settime timer_delete
	getuid geteuid getgid getegid getgroups getrandom getrlimit getrusage prlimit64 sysinfo uname
	open openat openat2 close close_range read write readv writev pread64 pwrite64 lseek
	stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents64 getcwd
	mkdir mkdirat unlink unlinkat rename renameat renameat2 chmod fchmod fchmodat ftruncate fsync fdatasync flock umask
	dup dup2 dup3 fcntl pipe pipe2 copy_file_range sendfile splice
	inotify_init1 inotify_add_watch inotify_rm_watch
	epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2 poll ppoll pselect6
	accept accept4 bind connect listen shutdown getsockname getpeername getsockopt setsockopt
	sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
	execve
`)

// limitedCalls are allowed with some arguments only. Rules for one call add up.
var limitedCalls = []*configs.Syscall{
	// Threads, and neither processes nor namespaces.
	allowIf("clone", masked(0, cloneNamespaces|unix.CLONE_THREAD, unix.CLONE_THREAD)),
	// Interfaces are read over route netlink; nothing can be changed there without
	// a capability.
	allowIf("socket", equal(0, unix.AF_INET)),
	allowIf("socket", equal(0, unix.AF_INET6)),
	allowIf("socket", equal(0, unix.AF_UNIX)),
	allowIf("socket", equal(0, unix.AF_NETLINK), equal(2, unix.NETLINK_ROUTE)),
	allowIf("socketpair", equal(0, unix.AF_UNIX)),
}

// cloneNamespaces are the flags of clone(2) that make a namespace.
const cloneNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

var serviceFilter = makeFilter()

func makeFilter() *configs.Seccomp {
	noSuchCall := uint(unix.ENOSYS)
	f := &configs.Seccomp{
		DefaultAction:   configs.Errno,
		DefaultErrnoRet: &noSuchCall,
		// Not the 32-bit calls that the kernel has too: they go past a list of names.
		Architectures: []string{"amd64"},
		Syscalls:      limitedCalls,
	}
	for _, name := range serviceCalls {
		f.Syscalls = append(f.Syscalls, &configs.Syscall{Name: name, Action: configs.Allow})
	}
	return f
}

func allowIf(name string, args ...*configs.Arg) *configs.Syscall {
	return &configs.Syscall{Name: name, Action: configs.Allow, Args: args}
}

func equal(index uint, value uint64) *configs.Arg {
	return &configs.Arg{Index: index, Value: value, Op: configs.EqualTo}
}

func masked(index uint, mask, value uint64) *configs.Arg {
	return &configs.Arg{Index: index, Value: mask, ValueTwo: value, Op: configs.MaskEqualTo}
}
