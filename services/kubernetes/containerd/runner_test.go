package containerd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A container doesn't keep the score of its shim. Where the kernel doesn't let a score be
// lowered, it stays, which is no error.
func TestOOMScoreAdj(t *testing.T) {
	t.Parallel()
	child := exec.Command("sleep", "infinity")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() { _ = child.Process.Kill(); _ = child.Wait() }
	t.Cleanup(end)
	pid := uint32(child.Process.Pid)
	path := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	for _, want := range []int{900, -997} {
		if err := setOOMScoreAdj(pid, want); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(string(got)) == fmt.Sprint(want) {
			continue
		}
		if err := os.WriteFile(path, []byte("-997"), 0); want > 0 || !errors.Is(err, fs.ErrPermission) {
			t.Errorf("the score is %s, want %d (%v)", got, want, err)
		}
	}
	end()
	if err := setOOMScoreAdj(pid, 0); err == nil {
		t.Error("no error for a process that has ended")
	}
}
