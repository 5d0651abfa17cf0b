//go:build e2e

package e2etest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// DaemonBudget is for the start of a builder's daemon, and then for its end.
const DaemonBudget = 30 * time.Second

// Docker starts Docker's daemon, without a network, until the test ends. The function runs the client.
func Docker(t testing.TB) func(args ...string) (string, error) {
	t.Helper()
	client, _ := DockerIn(t, nil)
	return client
}

// Daemon starts a program, with a file as its log, until the test ends.
func Daemon(t testing.TB, program *exec.Cmd, file string, start func() error) error {
	t.Helper()
	log, err := os.Create(file)
	if err != nil {
		return err
	}
	defer log.Close()
	program.Stdout, program.Stderr = log, log
	if err := start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- program.Wait() }()
	t.Cleanup(func() {
		_ = program.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-ended:
		case <-time.After(DaemonBudget):
			_ = program.Process.Kill()
			<-ended
		}
		if t.Failed() {
			text, _ := os.ReadFile(file)
			t.Logf("%s:\n%s", filepath.Base(program.Path), text)
		}
	})
	return nil
}

// DockerIn is Docker in a network namespace, in which it can make networks. The host is what DOCKER_HOST is for others.
func DockerIn(t testing.TB, inside *osthread.Thread) (client func(args ...string) (string, error), host string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "garboard-docker-") // short: it has a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	host = "unix://" + filepath.Join(dir, "socket")
	daemon := exec.Command("dockerd", "--host", host, "--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"),
		// --squash is experimental
		"--pidfile", filepath.Join(dir, "pid"), "--bridge=none", "--iptables=false", "--ip6tables=false", "--experimental")
	start := daemon.Start
	if inside != nil {
		start = func() error { return inside.Do(daemon.Start) }
	}
	if err := Daemon(t, daemon, filepath.Join(dir, "log"), start); err != nil {
		t.Fatalf("dockerd: %v: install the package docker.io, which 'make setup' does", err)
	}
	client = func(args ...string) (string, error) {
		cmd := exec.Command("docker", append([]string{"--host", host}, args...)...)
		// BuildKit before 0.17 doesn't build stages that only an ONBUILD instruction names.
		cmd.Env = append(os.Environ(), "DOCKER_BUILDKIT=0", "DOCKER_CONFIG="+dir)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			return out.String(), fmt.Errorf("docker %v: %w: %s", args, err, out.String())
		}
		return out.String(), nil
	}
	eventually.That(t, DaemonBudget, "dockerd answers", func() error {
		_, err := client("version")
		return err
	})
	return client, host
}
