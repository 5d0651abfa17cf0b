package process

import (
	"fmt"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// StartWithout is Start for a process, with all that it starts, to which some mount points are empty. It sees what is
// mounted elsewhere, also later, and what it mounts is seen by all, as with Start.
//
//	thread ── unshare ─▶ mount namespace ── an empty file system over each, of which nothing propagates ──▶ Start, the thread ends
func (t *Table) StartWithout(cmd *exec.Cmd, hidden ...string) (c *Child, err error) {
	done := make(chan struct{})
	var start func()
	start = func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			go start() // on another one: this is the thread of /proc/self, which can't end
			<-done
			runtime.UnlockOSThread()
			return
		}
		defer close(done)
		if err = hide(hidden); err == nil {
			c, err = t.Start(cmd)
		}
	}
	go start()
	<-done
	return c, err
}

// hide makes a mount namespace of this thread, in which mount points are empty.
func hide(points []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	for _, at := range points {
		err := unix.Mount("", at, "", unix.MS_PRIVATE, "")
		if err == nil {
			err = unix.Mount("tmpfs", at, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=4k")
		}
		if err != nil {
			return fmt.Errorf("hide %s: %w", at, err)
		}
	}
	return nil
}
