package boot

import (
	"maps"
	"os"
	"slices"
)

// users are those of programs that have one of their own; image/rootfs has their names. Each group has the number of
// its user.
var users = map[string]int{"etcd": 60, "kube-apiserver": 61, "kube-controller-manager": 62, "kube-scheduler": 63}

// User is the user that a program runs as: root, unless it has one of its own.
func User(program string) int { return users[program] }

// OfProgram reports whether a user is that of a program.
func OfProgram(uid int) bool { return slices.Contains(slices.Collect(maps.Values(users)), uid) }

// Owner is the user that the files of a program are given to; -1 leaves them to who makes them, since only root, as PID
// 1 is, can give files away.
func Owner(program string) int {
	if os.Geteuid() != 0 {
		return -1
	}
	return User(program)
}
