package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
)

// applySettings writes the table's rows below dir (/proc/sys). A kernel may
// lack one; skipped is called for each that couldn't be set.
func applySettings(dir string, table []boot.Setting, skipped func(boot.Setting, error)) {
	for _, s := range table {
		if err := os.WriteFile(filepath.Join(dir, s.Name), []byte(s.Value+"\n"), 0); err != nil {
			skipped(s, err)
		}
	}
}

// settingsFor leaves only those of the network namespace, below net/, for a container: all
// others belong to the machine.
func settingsFor(mode boot.Mode) []boot.Setting {
	all := slices.Concat(boot.NodeParameters, boot.KubeletParameters, boot.HardeningParameters)
	return slices.DeleteFunc(all, func(s boot.Setting) bool {
		return mode == boot.Container && !strings.HasPrefix(s.Name, "net/")
	})
}

// openFiles is the number of files that containers may open. Programs that need many expect
// to be able to raise their own limit to this, and the kernel's fs.nr_open allows it.
const openFiles = 1 << 20

// raiseLimits sets the resource limits that all processes inherit. If the hard
// limit can't be raised (a container without CAP_SYS_RESOURCE) it stays.
func raiseLimits() error {
	for _, limit := range []struct {
		resource int
		name     string
		value    uint64
	}{
		{unix.RLIMIT_NOFILE, "open files", openFiles},
		{unix.RLIMIT_MEMLOCK, "locked memory", unix.RLIM_INFINITY},
		{unix.RLIMIT_NPROC, "processes", unix.RLIM_INFINITY},
	} {
		var now syscall.Rlimit
		if err := syscall.Getrlimit(limit.resource, &now); err != nil {
			return fmt.Errorf("read limit of %s: %w", limit.name, err)
		}
		want := syscall.Rlimit{Cur: limit.value, Max: max(now.Max, limit.value)}
		// Package syscall's Setrlimit: otherwise children would get the limit from
		// before the start of the Go runtime.
		err := syscall.Setrlimit(limit.resource, &want)
		if errors.Is(err, unix.EPERM) {
			err = syscall.Setrlimit(limit.resource, &syscall.Rlimit{Cur: min(now.Max, limit.value), Max: now.Max})
		}
		if err != nil {
			return fmt.Errorf("set limit of %s: %w", limit.name, err)
		}
	}
	return nil
}
