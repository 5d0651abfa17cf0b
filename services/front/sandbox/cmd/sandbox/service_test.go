package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

const goodServiceSpec = `{"id":"apid","args":["/sbin/init","apid"],"uid":50,"work":"/w","cgroup":"/system/apid",` +
	`"dir":"/s","memoryMax":67108864,"tasksMax":64,"oomScoreAdj":0}`

// PID 1 and this program are of one release, and agree by this text.
func TestServiceSpec(t *testing.T) {
	t.Parallel()
	if s, err := decodeServiceSpec([]byte(goodServiceSpec)); err != nil || s.Dir != "/s" || s.MemoryMax != 64<<20 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := decodeServiceSpec([]byte(strings.Replace(goodServiceSpec, `"id"`, `"caps":"all","id"`, 1))); err == nil || !strings.Contains(err.Error(), `unknown field "caps"`) {
		t.Errorf("an unknown key: %v", err)
	}
}

func TestServiceConfig(t *testing.T) {
	t.Parallel()
	spec, err := decodeServiceSpec([]byte(goodServiceSpec))
	if err != nil {
		t.Fatal(err)
	}
	for _, userNamespace := range []bool{true, false} {
		c := serviceConfig(spec, "/root", userNamespace)
		if got := c.Namespaces.Contains(configs.NEWUSER); got != userNamespace {
			t.Errorf("user namespace: %v", got)
		}
		if c.Namespaces.Contains(configs.NEWNET) {
			t.Error("the network isn't the node's")
		}
		caps := c.Capabilities
		if all := slices.Concat(caps.Bounding, caps.Effective, caps.Permitted, caps.Inheritable, caps.Ambient); len(all) > 0 || !c.NoNewPrivileges || !c.Readonlyfs {
			t.Errorf("capabilities %v, no new privileges %v, read-only %v", all, c.NoNewPrivileges, c.Readonlyfs)
		}
		// Only the program can be executed. What is the node's can't be written to.
		for _, m := range c.Mounts {
			program := m.Destination == "/sbin/init"
			if exec := m.Flags&unix.MS_NOEXEC == 0; exec != program || m.Device == "bind" && m.Flags&unix.MS_RDONLY == 0 {
				t.Errorf("%s: flags %#x", m.Destination, m.Flags)
			}
		}
	}
}

// What makes the list a sandbox, not only a list: these aren't in it.
func TestServiceFilterLacks(t *testing.T) {
	t.Parallel()
	for _, name := range strings.Fields(`
		fork vfork clone3 kill tkill pidfd_open pidfd_getfd pidfd_send_signal ptrace process_vm_readv process_vm_writev prctl seccomp execveat
		mount umount2 pivot_root chroot open_tree move_mount fsopen unshare setns
		bpf perf_event_open userfaultfd io_uring_setup io_uring_enter keyctl add_key request_key
		init_module finit_module delete_module kexec_load reboot swapon ioctl ioperm iopl mknod mknodat personality
		setuid setgid setresuid setresgid setgroups capset sethostname settimeofday clock_settime adjtimex quotactl acct syslog
		link linkat symlink symlinkat chown fchown fchownat setxattr
	`) {
		for _, call := range serviceFilter.Syscalls {
			if call.Name == name {
				t.Errorf("%s is allowed", name)
			}
		}
	}
	for _, call := range limitedCalls {
		if slices.Contains(serviceCalls, call.Name) {
			t.Errorf("%s is limited, and allowed without limits", call.Name)
		}
	}
}
