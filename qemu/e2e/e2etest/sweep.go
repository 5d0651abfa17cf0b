//go:build e2e

package e2etest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

// sweepPrefix is before the cluster's name in one argument, so that the process does not
// count as one of the cluster's (package snapshot).
const sweepPrefix = "sweep="

// Sweep removes a cluster, which another program makes and holds, after the
// test has ended, also if the test was interrupted or ran out of time and
// cleans up nothing. It also removes the directory of its clusters.
//
//	test ── pipe ──► sweep: a byte is the test's end; an end without one its death
func Sweep(t testing.TB, cluster string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], sweepPrefix+cluster)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the test
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	test, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatalf("sweep: %v", err)
	}
	t.Cleanup(func() {
		_, err := test.Write([]byte{'.'})
		if err := errors.Join(err, test.Close(), cmd.Wait()); err != nil {
			t.Errorf("sweep: %v: %s", err, said.String())
		}
	})
}

func sweep(ctx context.Context, cluster string) error {
	word, err := io.ReadAll(os.Stdin)
	err = errors.Join(err, qemu.Down(ctx, cluster))
	if len(word) == 0 {
		err = errors.Join(err, os.RemoveAll(os.Getenv(homeVar)))
	}
	return err
}
