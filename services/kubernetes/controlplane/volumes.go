package controlplane

import (
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// openVolumes gives a program what it is to write to in its volumes, and what only root may read there:
// its configuration files, the audit log, and extraVolumes, also with content of a release in which it
// was root. These are files, and directories with files only. It returns what the program can't use.
func openVolumes(program string, pod kubeclient.Object) (problems []error) {
	uid := boot.User(program)
	for i, mount := range pod.List("spec", "containers")[0].List("volumeMounts") {
		path := pod.List("spec", "volumes")[i].Text("hostPath", "path")
		readOnly, _ := mount["readOnly"].(bool)
		writes := !readOnly && strings.HasPrefix(path, boot.EphemeralDir+"/")
		if writes {
			_ = untrusted.MkdirAll(path, 0o700) // or a file is there
		}
		below, _ := untrusted.Glob(path, "*")
		for j, path := range append([]string{path}, below...) {
			if readable(path, uid) && (!writes || j > 0) {
				continue
			}
			err := fs.ErrPermission // it is the node's own
			if !strings.HasPrefix(path, "/system/") {
				err = untrusted.Give(path, boot.Owner(program), 1)
			}
			if err != nil {
				problems = append(problems, fmt.Errorf("%s runs as user %d, and may not use %s of its extraVolumes: %w", program, uid, path, err))
				if j == 0 {
					break
				}
			}
		}
	}
	return problems
}

// readable reports whether a user may read what is at a path. What isn't there may come later.
func readable(path string, uid int) bool {
	info, err := untrusted.Stat(path)
	if err != nil {
		return true
	}
	st, _ := info.Sys().(*syscall.Stat_t)
	mode, need := info.Mode().Perm(), fs.FileMode(0o4)
	if info.IsDir() {
		need = 0o5
	}
	return int(st.Uid) == uid && mode>>6&need == need || int(st.Gid) == uid && mode>>3&need == need || mode&need == need
}
