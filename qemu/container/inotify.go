package container

import (
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
)

const (
	// inotifyLimit is how many inotify instances all processes of one user may have. All
	// container nodes share it, because they run as root (inotify(7)). A node has a dozen as
	// soon as it is Ready, and the kernel's default is 128. Beyond the limit containerd's CRI
	// does not start, and the kubelet can't connect to it.
	inotifyLimit = "/proc/sys/fs/inotify/max_user_instances"
	// inotifyInstances is the value that a node in a virtual machine sets.
	inotifyInstances = 8192
)

// RaiseInotifyLimit raises this machine's limit of inotify instances for container nodes, and
// logs it if it does.
func RaiseInotifyLimit(log *slog.Logger) error {
	was, err := raise(inotifyLimit, inotifyInstances)
	if err == nil && was < inotifyInstances {
		log.Info("raised a limit of this machine, which all container nodes share", "file", inotifyLimit, "from", was, "to", inotifyInstances)
	}
	return err
}

// raise makes a limit of the kernel at least so high, and returns the former value.
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
