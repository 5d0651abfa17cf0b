package process

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// In a process of its own, whose mounts are shared as PID 1's are.
func TestHiddenMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes mount namespaces")
	}
	cmd := helper("hider", t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func helperHider(args []string) {
	top := args[0]
	check(unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	for _, dir := range []string{"state", "open"} {
		check(os.Mkdir(filepath.Join(top, dir), 0o755))
		check(unix.Mount("tmpfs", filepath.Join(top, dir), "tmpfs", 0, ""))
	}
	secret := filepath.Join(top, "state/config")
	check(os.WriteFile(secret, []byte("secret"), 0o600))
	for _, dir := range []string{"deep", "late"} {
		check(os.Mkdir(filepath.Join(top, "open", dir), 0o755))
	}
	before, err := os.ReadFile("/proc/self/mountinfo")
	check(err)
	table := New()
	runtime.GOMAXPROCS(1) // the goroutines take turns on few threads, also on the first one
	for range 50 {
		child, err := table.StartWithout(helper("exit", "0"), filepath.Join(top, "state"))
		check(err)
		check(child.Wait())
	}
	if after, err := os.ReadFile("/proc/self/mountinfo"); err != nil || string(after) != string(before) {
		check(fmt.Errorf("the mounts here are others now: %w\n%s", err, after))
	}

	cmd := helper("hidden", top)
	in, err := cmd.StdinPipe()
	check(err)
	read, write, err := os.Pipe()
	check(err)
	cmd.Stdout = write
	child, err := table.StartWithout(cmd, filepath.Join(top, "state"))
	check(err)
	check(write.Close())
	line, _ := bufio.NewReader(read).ReadString('\n') // none if it has ended, and Wait says why
	if strings.TrimSpace(line) == "mounted" {
		_, err = os.Stat(filepath.Join(top, "open/deep/made"))
		check(err)
		check(unix.Mount("tmpfs", filepath.Join(top, "open/late"), "tmpfs", 0, ""))
		check(os.WriteFile(filepath.Join(top, "open/late/made"), nil, 0o600))
		check(in.Close())
	}
	check(child.Wait())
	text, err := os.ReadFile(secret)
	if check(err); string(text) != "secret" {
		check(fmt.Errorf("it is %q now", text))
	}
	if _, err := table.StartWithout(helper("exit", "0"), filepath.Join(top, "open/deep/no")); err == nil {
		check(errors.New("a place that isn't a mount point was hidden"))
	}
}

// helperHidden is started without a place.
func helperHidden(args []string) {
	top := args[0]
	if _, err := os.ReadFile(filepath.Join(top, "state/config")); !errors.Is(err, fs.ErrNotExist) {
		check(fmt.Errorf("what is hidden was read: %w", err))
	}
	if err := os.WriteFile(filepath.Join(top, "state/config"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		check(fmt.Errorf("what is hidden was written: %w", err))
	}
	check(unix.Mount("tmpfs", filepath.Join(top, "open/deep"), "tmpfs", 0, ""))
	check(os.WriteFile(filepath.Join(top, "open/deep/made"), nil, 0o600))
	fmt.Println("mounted")
	_, _ = os.Stdin.Read(make([]byte, 1))
	_, err := os.Stat(filepath.Join(top, "open/late/made"))
	check(err)
}
