package qemu

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// onlyV2 requests a machine with only cgroup v2. The process has a mount namespace of its own
// then.
const onlyV2 = "GARBOARD_TEST_ONLY_CGROUP_V2"

// removeAtEnd are directories that all tests share.
var removeAtEnd []string

// TestMain: the test binary is also the program that a cluster starts as its host process,
// as `host --cluster NAME`.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 4 && os.Args[1] == "host":
		os.Exit(callback(func(ctx context.Context) error {
			return Host(ctx, os.Args[3], slog.New(slog.NewTextHandler(os.Stderr, nil)))
		}))
	case len(os.Args) == 3 && os.Args[1] == "up":
		os.Exit(callback(func(ctx context.Context) error { return upAsTold(ctx, os.Args[2]) }))
	case len(os.Args) == 3 && os.Args[1] == "without-root":
		os.Exit(callback(func(ctx context.Context) error { return withoutRoot(ctx, os.Args[2]) }))
	case len(os.Args) == 3 && os.Args[1] == "down":
		os.Exit(callback(func(ctx context.Context) error { return Down(ctx, os.Args[2]) }))
	}
	if os.Getenv(onlyV2) != "" {
		if err := unix.Mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mount cgroup2:", err)
			os.Exit(1)
		}
	}
	code := m.Run()
	for _, dir := range removeAtEnd {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

func callback(f func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := f(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
