package devcluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What the help says is what is so.
func TestReadyBudgets(t *testing.T) {
	t.Parallel()
	minutes := func(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }
	want := minutes(readyBudget) + " and " + minutes(readyBudgetNode) + " for each further node; " + minutes(readyBudgetEmulated) + " where QEMU emulates"
	if ReadyBudgets != want {
		t.Errorf("%q, not %q", ReadyBudgets, want)
	}
}

// What controllers fail to do during a start isn't what the user waits for, nor is the chart of the boot. A start that
// fails names the controller.
func TestProgressIsNoFailureOfAController(t *testing.T) {
	t.Parallel()
	console := filepath.Join(t.TempDir(), "console.log")
	text := "[    1.0] [garboard] service etcd: running\n[    1.2] [garboard] controller-runtime: k8s.X: controller failed: refused\n[    1.3] other\n" +
		"[    1.4] [garboard] boot chart:\n[    1.4] [garboard]   disks         0.1s  |\n[    1.4] [garboard] * critical path: disks > etcd\n"
	if err := os.WriteFile(console, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := lastMessage(console, awaited); got != "service etcd: running" {
		t.Errorf("%q", got)
	}
	if got := lastMessage(console, failed.MatchString); got != "controller-runtime: k8s.X: controller failed: refused" {
		t.Errorf("%q", got)
	}
}
