package disks

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/system/disk"
	"golang.org/x/sys/unix"
)

// Percentages of free space, and of free inodes where they are limited. The kubelet evicts pods
// below 10 by default (nodefs.available<10%).
const (
	roomy      = 10 // at this limit the file system counts as having room again
	nearlyFull = 5  // half of what the kubelet tries to keep free
	full       = 2  // doctor's limit for disk-full: writes fail soon

	// spaceEvery: an image pull can fill a disk within a minute, and statfs(2) is cheap.
	spaceEvery = 10 * time.Second
)

// fileSystem is a file system to watch, with what was logged about it. Each line is
// logged once: after that, changes around a limit log nothing until there is room again.
//
//	roomy ──▶ nearly full ──▶ full
//	  ▲            │            │
//	  └── free ≥ 10 % ──────────┘
type fileSystem struct {
	label, dir string
	next       string // what a user can do
	logged     int    // the last limit that was logged; roomy: none
}

type statfs func(dir string, to *unix.Statfs_t) error

// space is the file systems to watch. In a container both directories are the host's.
type space struct {
	all    []*fileSystem
	statfs statfs
	log    *slog.Logger
}

func (d *Disks) space() space {
	state := &fileSystem{boot.LabelState, d.o.dirs.State, "see what fills it with 'gbctl ls -l " + boot.StateDir + "'", roomy}
	ephemeral := &fileSystem{boot.LabelEphemeral, d.o.dirs.Var, "remove images that nothing uses ('gbctl images -k', 'gbctl images rm') or what else fills it ('gbctl ls -l /var'), or give the machine a larger disk", roomy}
	all := []*fileSystem{state, ephemeral}
	if d.o.Mode == boot.Container {
		ephemeral.next, all = "make room on the host", all[1:]
	}
	return space{all, d.o.statfs, d.log}
}

// check logs when a file system becomes full while the node runs.
func (s space) check() {
	for _, f := range s.all {
		var st unix.Statfs_t
		if err := s.statfs(f.dir, &st); err != nil || st.Blocks == 0 {
			continue
		}
		if level, line := f.now(&st); line != "" {
			s.log.Log(context.Background(), level, line)
		}
	}
}

// now is the line to log, or "".
func (f *fileSystem) now(st *unix.Statfs_t) (level slog.Level, line string) {
	left := st.Bavail * 100 / st.Blocks
	has := fmt.Sprintf("%s of %s are free", disk.SizeText(int64(st.Bavail)*st.Bsize), disk.SizeText(int64(st.Blocks)*st.Bsize))
	if st.Files > 0 && st.Ffree*100/st.Files < left { // file systems without a limit have 0
		left = st.Ffree * 100 / st.Files
		has = fmt.Sprintf("%d of %d inodes are free, the number of files that it can hold", st.Ffree, st.Files)
	}
	switch {
	case left < full && f.logged > full:
		f.logged = full
		return slog.LevelError, fmt.Sprintf("%s (%s) is full: %s. Writes fail; %s", f.label, f.dir, has, f.next)
	case left < nearlyFull && f.logged > nearlyFull:
		f.logged = nearlyFull
		return slog.LevelWarn, fmt.Sprintf("%s (%s) is nearly full: %s. Going on; %s", f.label, f.dir, has, f.next)
	case left >= roomy && f.logged < roomy:
		f.logged = roomy
		return logs.LevelNotice, fmt.Sprintf("%s (%s) has room again: %s", f.label, f.dir, has)
	}
	return 0, ""
}
