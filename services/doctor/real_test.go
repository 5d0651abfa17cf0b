//go:build story

package doctor

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
)

// componentsVar is a list like PATH of the folders with etcd and Kubernetes'
// programs. `make stories` sets it once they are built.
const componentsVar = "GARBOARD_COMPONENTS"

// refuseBudget is for a program to look at its command line.
const refuseBudget = 10 * time.Second

func program(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range filepath.SplitList(os.Getenv(componentsVar)) {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode()&0o111 != 0 {
			return filepath.Join(dir, name)
		}
	}
	t.Fatalf("%s is in none of the folders of %s=%q", name, componentsVar, os.Getenv(componentsVar))
	return ""
}

// What the real programs say of a wrong argument is understood, also in the releases
// to come.
func TestRealProgramsRefuse(t *testing.T) {
	refuse := func(name, flag, value string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(refuseBudget))
		defer cancel()
		out, err := exec.CommandContext(ctx, program(t, name), "--"+flag+"="+value).CombinedOutput()
		if err == nil || ctx.Err() != nil {
			t.Errorf("%s took --%s=%s: %v", name, flag, value, err)
			return
		}
		words := lastWords(strings.Split(string(out), "\n"))
		if got := wrongFlag(words); got != flag {
			t.Errorf("%s: the last words are %q, which blames %q", name, words, got)
		}
	}
	for _, name := range []string{"etcd", "kubelet", apiServer, controllerManager, scheduler} {
		refuse(name, "no-such-flag", "1")
	}
	refuse("etcd", "heartbeat-interval", "abc")
	refuse("kubelet", "max-pods", "abc")
	refuse(apiServer, "secure-port", "abc")
	refuse(scheduler, "leader-elect", "perhaps")
}
