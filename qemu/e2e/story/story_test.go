//go:build e2e && long

// Package story tests the first day of a new user: scripts type what README.md and the pages that it names say, and
// paste what is printed, from a fresh clone on. A person can run them, too.
package story

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	cluster = "story" // as in the script
	// dayBudget is for all of a script with containers, at native speed.
	dayBudget = 15 * time.Minute
)

// A user has a home of their own, a repository to clone, and the tools that the README asks for.
type user struct {
	t               *testing.T
	dir, repository string
}

func newUser(t *testing.T) *user {
	t.Helper()
	e2etest.Pace(t)
	u := &user{t: t, dir: t.TempDir()}
	u.repository = filepath.Join(u.dir, "repository")
	home := filepath.Join(u.dir, "my home") // what is printed has to be right for any path
	settings := map[string]string{}
	for _, name := range []string{"GOENV", "GOPATH", "GOCACHE", "GOMODCACHE"} {
		settings[name] = strings.TrimSpace(u.run(exec.Command("go", "env", name)))
	}
	var err error
	if settings["XDG_CACHE_HOME"], err = os.UserCacheDir(); err != nil { // what is built is the same for all users
		t.Fatal(err)
	}
	settings["HOME"], settings["GARBOARD_HOME"] = home, filepath.Join(home, ".garboard") // the default
	settings["KUBECONFIG"], settings[client.EnvConfig] = "", ""
	for name, value := range settings {
		t.Setenv(name, value)
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	u.commit()
	return u
}

// commit makes the repository of the files of this checkout, which the copy of a checkout has, too. The same files are
// the same commit.
func (u *user) commit() {
	u.t.Helper()
	const day = "2026-01-01T00:00:00Z"
	for _, args := range [][]string{
		{"init", "-q", "--bare", u.repository},
		{"--git-dir=" + u.repository, "--work-tree=../../..", "add", "--all"},
		{"--git-dir=" + u.repository, "--work-tree=../../..", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all: the checkout"},
	} {
		git := exec.Command("git", args...)
		git.Env = append(os.Environ(), "GIT_AUTHOR_DATE="+day, "GIT_COMMITTER_DATE="+day)
		u.run(git)
	}
}

func (u *user) run(cmd *exec.Cmd) string {
	u.t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		u.t.Fatalf("%s: %v: %s", cmd, err, out)
	}
	return string(out)
}

// types runs a script of testdata with these arguments, on a thread or here. The budget is for all of it, at native
// speed.
func (u *user) types(inside *osthread.Thread, budget time.Duration, script string, args ...string) {
	u.t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", script))
	if err != nil {
		u.t.Fatal(err)
	}
	ctx, cancel := eventually.Context(u.t.Context(), budget)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = u.dir
	cmd.Stdout, cmd.Stderr = u.t.Output(), u.t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) } // what it has typed, too
	cmd.WaitDelay = time.Minute
	start := cmd.Start
	if inside != nil {
		start = func() error { return inside.Do(cmd.Start) }
	}
	if err = start(); err == nil {
		err = cmd.Wait()
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		u.t.Fatalf("%s didn't end in %s, at this machine's pace", script, budget)
	}
	if err != nil {
		u.t.Fatalf("%s: %v", script, err)
	}
}

// On a cluster in containers: try it, an app with storage and an image of one's own, break and mend, remove a node, add
// a node.
func TestStoryInContainers(t *testing.T) {
	e2etest.Built(t, qemu.Container)
	u := newUser(t)
	_, host := e2etest.DockerIn(t, nil)
	t.Setenv("DOCKER_HOST", host)
	t.Setenv("DOCKER_BUILDKIT", "0") // BuildKit is another package of Debian
	t.Setenv("PATH", filepath.Dir(e2etest.Built(t, qemu.Container).Kubectl())+":"+os.Getenv("PATH"))
	e2etest.Sweep(t, cluster)
	t.Attr(e2etest.Booted, qemu.Container)
	u.types(nil, dayBudget, "containers.sh", u.repository, u.dir)
}
