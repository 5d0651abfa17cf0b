package main

import (
	_ "embed"
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
var serviceCalls = strings.Fields(serviceCallNames)

//go:embed seccomp.txt
var serviceCallNames string

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
