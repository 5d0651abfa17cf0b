//go:build unix

package boot

import (
	"path/filepath"
	"syscall"
)

// IsMountPoint reports whether a file system is mounted at dir, by its device.
// Data written to STATE before it is mounted would be lost below the mount point.
func IsMountPoint(dir string) bool {
	var here, parent syscall.Stat_t
	if syscall.Stat(dir, &here) != nil || syscall.Stat(filepath.Dir(dir), &parent) != nil {
		return false
	}
	return here.Dev != parent.Dev
}
