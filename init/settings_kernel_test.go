//go:build kernel

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/uml"
)

// lacks are parameters that User Mode Linux doesn't have: no performance events, no kexec, no Yama, no JIT.
var lacks = []string{"kernel/perf_event_paranoid", "kernel/kexec_load_disabled", "kernel/yama/ptrace_scope", "net/core/bpf_jit_harden", "vm/unprivileged_userfaultfd"}

// A kernel has what hardens it, and takes what a user sets otherwise.
func TestHardeningIsSet(t *testing.T) {
	uml.Booted(t)
	refused := map[string]error{}
	applySettings("/proc/sys", settingsFor(boot.Machine), func(s boot.Setting, err error) { refused[s.Name] = err })
	set := 0
	for _, s := range boot.HardeningParameters {
		path := filepath.Join("/proc/sys", s.Name)
		got, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) && slices.Contains(lacks, s.Name) {
			continue
		}
		if err != nil || refused[s.Name] != nil || strings.TrimSpace(string(got)) != s.Value {
			t.Errorf("%s is %q, want %q: %v, %v", s.Name, got, s.Value, err, refused[s.Name])
			continue
		}
		set++
		if s.Name == "kernel/kexec_load_disabled" {
			continue
		}
		if err := os.WriteFile(path, []byte("0\n"), 0); err != nil {
			t.Errorf("%s can't be set otherwise: %v", s.Name, err)
		}
	}
	if set < len(boot.HardeningParameters)-len(lacks) {
		t.Errorf("only %d parameters are there", set)
	}
}
