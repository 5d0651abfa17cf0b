package boot

import (
	"slices"
	"strings"
)

// Setting is a kernel argument, or a kernel parameter (sysctl) by its path below /proc/sys.
type Setting struct{ Name, Value, Why string }

// Unlocked replaces the argument lockdown. The kernel knows no such value, and isn't locked down.
const Unlocked = "lockdown=none"

// HardeningArguments are on the command line of each kernel that a build or an installation makes.
// docs/hardening.md has both tables, and compares them with what the Kernel Self Protection Project recommends.
var HardeningArguments = []Setting{
	{"slab_nomerge", "", "kinds of kernel objects don't share memory, so that an overflow of one doesn't reach the others"},
	{"init_on_alloc", "1", "memory that the kernel gives out is zeroed: nothing leaks that was in it before"},
	{"page_alloc.shuffle", "1", "the order of free pages can't be guessed"},
	{"randomize_kstack_offset", "on", "each system call has its stack at another place"},
	{"vsyscall", "none", "code at a fixed address helps exploits. Programs linked with glibc before 2.14 (2011) need it: `vsyscall=xonly`"},
	{"proc_mem.force_override", "never", "nobody writes to read-only memory of programs by /proc/PID/mem. Debuggers that don't fall back to ptrace need it: `proc_mem.force_override=ptrace`"},
	{"lockdown", "integrity", "root can't change the running kernel: no modules without the kernel's own signature, no /dev/mem, no writing to the memory of devices by sysfs. Pods with drivers of their own need it off: `lockdown=none`"},
}

// HardeningParameters are set by PID 1 before any other program runs. machine.sysctls has priority.
var HardeningParameters = []Setting{
	{"kernel/kptr_restrict", "2", "addresses of the kernel are for nobody, not even root in a pod. Tracers need it: `1`"},
	{"kernel/dmesg_restrict", "1", "nor is the kernel's log, which has some"},
	{"kernel/perf_event_paranoid", "3", "performance events, a large interface with a history of flaws, need CAP_PERFMON"},
	{"kernel/kexec_load_disabled", "1", "no other kernel replaces the running one: the node restarts through its firmware. The kernel doesn't take it back before a restart"},
	{"kernel/yama/ptrace_scope", "1", "a program reads the memory of its own children only. Debuggers that attach to others need CAP_SYS_PTRACE"},
	{"kernel/unprivileged_bpf_disabled", "2", "a way into the kernel that no pod needs. CNIs with eBPF have CAP_BPF. 2 and not 1, which can't be taken back"},
	{"net/core/bpf_jit_harden", "2", "constants in eBPF programs can't smuggle machine code into the kernel. It belongs to the machine. A CNI that does all in eBPF may want `1`"},
	{"dev/tty/ldisc_autoload", "0", "old drivers of terminals don't load because a program without privileges asks"},
	{"vm/unprivileged_userfaultfd", "0", "stopping the kernel within a page fault makes races easy to win"},
	{"fs/protected_fifos", "2", "known attacks through shared directories"},
	{"fs/protected_regular", "2", "the same"},
	{"fs/protected_hardlinks", "1", "the same"},
	{"fs/protected_symlinks", "1", "the same"},
	{"fs/suid_dumpable", "0", "programs that changed their privileges leave no core with their secrets"},
	{"net/ipv4/conf/all/send_redirects", "0", "the node forwards for pods, and is no router that knows a better way"},
	{"net/ipv4/conf/default/send_redirects", "0", "the same, for links to come"},
}

// KubeletParameters are those that the kubelet demands where it may not set them itself
// (protectKernelDefaults). PID 1 sets them at boot, too.
var KubeletParameters = []Setting{
	{"vm/overcommit_memory", "1", "limits come from cgroups"},
	{"vm/panic_on_oom", "0", "one pod out of memory isn't the machine's end"},
	{"kernel/panic", "10", "a machine that died comes back, and the console can be read before"},
	{"kernel/panic_on_oops", "1", "a damaged kernel must not go on"},
	{"kernel/keys/root_maxkeys", "1000000", "each container has a keyring"},
	{"kernel/keys/root_maxbytes", "25000000", "the same: 25 bytes a key"},
}

// Hardening are HardeningArguments as they are on a command line.
func Hardening() (args []string) {
	for _, s := range HardeningArguments {
		args = append(args, Param{s.Name, s.Value}.String())
	}
	return args
}

// Yield returns args without hardening arguments that others set otherwise.
func Yield(args, others []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return slices.ContainsFunc(HardeningArguments, func(s Setting) bool { return s.named(arg) && slices.ContainsFunc(others, s.named) })
	})
}

// named reports whether an argument sets the same.
func (s Setting) named(arg string) bool {
	key, _, _ := strings.Cut(arg, "=")
	return sameKey(key, s.Name)
}
