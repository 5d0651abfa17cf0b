package qemu

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const (
	// inotifyLimit is how many inotify instances all processes of one user may have,
	// and with it all container nodes, as they are root's (inotify(7)). A node has a
	// dozen as soon as it is Ready, and the kernel's default is 128: beyond that containerd
	// has no CRI, and a kubelet none to speak to.
	inotifyLimit = "/proc/sys/fs/inotify/max_user_instances"
	// inotifyInstances is what a node that is a machine sets for itself.
	inotifyInstances = 8192
)

// raise makes a limit of the kernel at least so high, and says how high it was.
func raise(file string, least int) (was int, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	if was, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
		return 0, fmt.Errorf("%s: %w", file, err)
	}
	if was >= least {
		return was, nil
	}
	return was, os.WriteFile(file, []byte(strconv.Itoa(least)), 0o644)
}
