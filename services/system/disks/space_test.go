package disks

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/volume"
	"golang.org/x/sys/unix"
)

// A disk that becomes full while the node runs is logged once per limit, with
// the free space and what to do, and again only after there was room.
func TestDiskFillsUpWhileTheNodeRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var free, files atomic.Uint64 // of 1000
		l := logs.New(nil)
		d := New(Options{Mode: boot.Machine, Logs: l, dirs: volume.Dirs{State: "/state", Var: "/var"}, statfs: func(dir string, to *unix.Statfs_t) error {
			*to = unix.Statfs_t{Bsize: 1 << 20, Blocks: 1000, Bavail: 900, Files: 1000, Ffree: 900}
			if dir == "/var" {
				to.Bavail, to.Ffree = free.Load(), files.Load()
			}
			return nil
		}})
		free.Store(500)
		files.Store(900)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		all := d.space()
		all.check()
		go func() {
			for sleep.For(ctx, spaceEvery) {
				all.check()
			}
		}()
		logged := 0
		for _, step := range []struct {
			free, files uint64
			want        []string // parts of the one new line; none: no line
		}{
			{60, 900, nil},
			{49, 900, []string{"warning: EPHEMERAL (/var) is nearly full: 49 MiB of 1000 MiB are free", "gbctl images rm"}},
			{55, 900, nil},
			{49, 900, nil},
			{19, 900, []string{"error: EPHEMERAL (/var) is full: 19 MiB of 1000 MiB are free. Writes fail", "gbctl images rm", "a larger disk"}},
			{30, 900, nil},
			{10, 900, nil},
			{99, 900, nil},
			{100, 900, []string{"EPHEMERAL (/var) has room again: 100 MiB of 1000 MiB are free"}},
			{0, 900, []string{"EPHEMERAL (/var) is full: 0"}},
			{500, 900, []string{"has room again"}},
			{500, 15, []string{"EPHEMERAL (/var) is full: 15 of 1000 inodes are free"}},
		} {
			free.Store(step.free)
			files.Store(step.files)
			time.Sleep(3 * spaceEvery) // virtual
			synctest.Wait()
			lines := l.Tail(ID, 0)
			news := lines[logged:]
			logged = len(lines)
			if len(news) != min(len(step.want), 1) || slices.ContainsFunc(step.want, func(text string) bool { return !strings.Contains(news[0], text) }) {
				t.Errorf("%d free, %d inodes: %q, want %q", step.free, step.files, news, step.want)
			}
		}
	})
}

// The disk of a container belongs to the host, and both directories are on it.
func TestDiskOfAContainerIsTheHosts(t *testing.T) {
	t.Parallel()
	l := logs.New(nil)
	d := New(Options{Mode: boot.Container, Logs: l, statfs: func(_ string, to *unix.Statfs_t) error {
		*to = unix.Statfs_t{Bsize: 1 << 20, Blocks: 1000}
		return nil
	}})
	d.space().check()
	if lines := l.Tail(ID, 0); len(lines) != 1 || !strings.Contains(lines[0], "is full") || !strings.Contains(lines[0], "make room on the host") {
		t.Errorf("%q", lines)
	}
}
