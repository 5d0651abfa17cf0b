//go:build e2e && long

package upgradek8s

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The programs that are built here refuse what the tables have, and the older ones don't.
func TestRemovedSettingsOfThePrograms(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	program := func(component, name string) string {
		found, err := filepath.Glob(filepath.Join(cache, "garboard", component, "*", name))
		if err != nil || len(found) == 0 {
			t.Skipf("%s isn't built on this machine", component)
		}
		return found[0]
	}
	// Without a configuration, each ends by itself.
	output := func(args ...string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		text, _ := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput() // it always fails
		return string(text)
	}
	opposite := func(gate string, always bool) string { return fmt.Sprintf("--feature-gates=%s=%t", gate, !always) }
	for version, component := range map[int]string{36: "kubernetes-1.36", 37: "kubernetes"} {
		scheduler := program(component, "kube-scheduler")
		for _, gate := range gates.Removed[version] {
			if text := output(scheduler, "--feature-gates="+gate+"=true"); !strings.Contains(text, "unrecognized feature gate: "+gate) {
				t.Errorf("v1.%d: %s: %s", version, gate, text)
			}
		}
		for gate, always := range gates.Locked[version] {
			if text := output(scheduler, opposite(gate, always)); !strings.Contains(text, "is locked to") {
				t.Errorf("v1.%d: %s: %s", version, gate, text)
			}
		}
	}
	before := program("kubernetes-1.36", "kube-scheduler")
	for _, gate := range gates.Removed[37] {
		if text := output(before, "--feature-gates="+gate+"=true"); strings.Contains(text, "unrecognized feature gate") {
			t.Errorf("v1.36 doesn't know %s already: %s", gate, text)
		}
	}
	for gate, always := range gates.Locked[37] {
		if text := output(before, opposite(gate, always)); strings.Contains(text, "is locked to") {
			t.Errorf("v1.36 has locked %s already: %s", gate, text)
		}
	}
}
