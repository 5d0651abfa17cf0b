//go:build e2e && long

package machines

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// bootBudget is for a machine whose API answers.
const bootBudget = 30 * time.Second

// unhardened are arguments with which a kernel does what it did before it was hardened.
const unhardened = "slab_merge init_on_alloc=0 page_alloc.shuffle=0 randomize_kstack_offset=off vsyscall=xonly proc_mem.force_override=always lockdown=none"

// parameter is a row of docs/hardening.md, which is made from the table of what PID 1 sets.
var parameter = regexp.MustCompile("(?m)^\\| `([a-z0-9_.]+) = ([^`]+)` \\|")

// A machine boots with all that hardens its kernel, and with what its user sets otherwise. The
// log has the time from the start of the kernel until the machine API serves, of both.
func TestHardenedKernel(t *testing.T) {
	hardened(t)
	yielding(t)
}

func hardened(t *testing.T) {
	c, _ := e2etest.Start(t, "hardened", qemu.QEMU, e2etest.Nodes(1, 0))
	read := reader(t, c)
	arguments := " " + strings.TrimSpace(read("/proc/cmdline")) + " "
	for _, arg := range media.Hardening() {
		if !strings.Contains(arguments, " "+arg+" ") {
			t.Errorf("the kernel has no argument %s: %s", arg, arguments)
		}
	}
	page, err := os.ReadFile("../../../docs/hardening.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "### Kernel parameters")
	table, _, _ = strings.Cut(table, "\n## ")
	rows := parameter.FindAllStringSubmatch(table, -1)
	if len(rows) < 15 {
		t.Errorf("the page has only %d parameters", len(rows))
	}
	for _, row := range rows {
		if got := strings.TrimSpace(read("/proc/sys/" + strings.ReplaceAll(row[1], ".", "/"))); got != row[2] {
			t.Errorf("%s is %q, want %q", row[1], got, row[2])
		}
	}
	if got := read("/sys/kernel/security/lockdown"); !strings.Contains(got, "[integrity]") {
		t.Errorf("lockdown is %q", got)
	}
	log := c.Gbctl("dmesg", "-n", c.Nodes[0].Address.String())
	for line := range strings.Lines(log) {
		if strings.Contains(line, "Lockdown:") && !strings.Contains(line, "hibernation is restricted") || strings.Contains(line, "unsigned module") || strings.Contains(line, "unavailable key") || strings.Contains(line, "kernel setting not applied") {
			t.Errorf("the kernel refused something: %s", line)
		}
	}
}

func yielding(t *testing.T) {
	c, _ := e2etest.Start(t, "unhardened", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.Boot.Cmdline = unhardened
		o.ControlPlanePatches = [][]byte{[]byte("machine: {sysctls: {kernel.kptr_restrict: '1', kernel.unprivileged_bpf_disabled: '0'}}\n")}
	})
	read := reader(t, c)
	if got := read("/proc/cmdline"); strings.Contains(got, "lockdown=integrity") || !strings.Contains(got, unhardened) {
		t.Errorf("arguments %s", got)
	}
	if got := read("/sys/kernel/security/lockdown"); !strings.Contains(got, "[none]") {
		t.Errorf("lockdown is %q", got)
	}
	for name, want := range map[string]string{"kernel/kptr_restrict": "1", "kernel/unprivileged_bpf_disabled": "0"} {
		c.Eventually(bootBudget, name+" is what the configuration says", func() error {
			if got := strings.TrimSpace(read("/proc/sys/" + name)); got != want {
				return fmt.Errorf("it is %q, want %q", got, want)
			}
			return nil
		})
	}
}

// reader waits for the machine API, and reads files of the node.
func reader(t *testing.T, c *e2etest.Cluster) func(path string) string {
	t.Helper()
	node := c.Nodes[0].Address.String()
	c.Eventually(bootBudget, "the machine API answers", func() error {
		_, err := c.TryGbctl("read", "-n", node, "/proc/cmdline")
		return err
	})
	for _, line := range c.Lines(0) {
		if strings.Contains(line.Text, "apid: Running") {
			t.Logf("%s: %6.1fs  %s", c.Node(), line.At.Seconds(), line.Text)
		}
	}
	return func(path string) string { return c.Gbctl("read", "-n", node, path) }
}
