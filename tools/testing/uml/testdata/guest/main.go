// Command guest is what the tests of package uml run: the wrapper, what that calls, and the
// programs that run in the guest.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/tools/testing/uml"
)

func main() {
	code, err := run(os.Args[1], os.Args[2:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		code = 1
	}
	os.Exit(code)
}

func run(what string, args []string) (int, error) {
	switch what {
	case "run":
		self, err := os.Executable()
		if err != nil {
			return 1, err
		}
		return uml.Run(context.Background(), self, append([]string{self}, args...), os.Stdout)
	case uml.KeepCommand:
		return uml.Keep(args)
	case uml.InitCommand:
		return 1, uml.Init()
	case uml.ModprobeCommand:
		return 0, uml.Modprobe(args)
	case "bytes":
		return bytes(args)
	case "panic":
		panic("as ordered")
	case "crash":
		return 1, os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "killed":
		return 1, syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "sleep":
		fmt.Println("asleep")
		time.Sleep(time.Hour)
	case "files":
		return 0, files(strings.TrimPrefix(args[0], "-test.testlogfile="))
	}
	return 1, fmt.Errorf("%s isn't known", what)
}

// bytes prints each value of a byte, so often, and its environment and directory. It leaves
// a process behind that holds its output open.
func bytes(args []string) (int, error) {
	times, err := strconv.Atoi(args[0])
	if err != nil {
		return 1, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 1, err
	}
	if _, err := os.StartProcess("/bin/sleep", []string{"sleep", "1000"}, &os.ProcAttr{Files: []*os.File{null, os.Stdout, os.Stderr}}); err != nil {
		return 1, err
	}
	each := make([]byte, 256)
	for i := range each {
		each[i] = byte(i)
	}
	for i := range times {
		to := os.Stdout
		if i%2 == 1 {
			to = os.Stderr
		}
		if _, err := to.Write(each); err != nil {
			return 1, err
		}
	}
	dir, err := os.Getwd()
	fmt.Print(os.Getenv("LONG"), dir)
	return 7, err
}

// files writes where the host wants it, and nowhere else, and makes the kernel load a module.
func files(log string) error {
	if err := os.WriteFile(log, []byte("written"), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(os.TempDir(), "left"), nil, 0o644); err != nil {
		return err
	}
	if err := os.WriteFile("main.go", nil, 0o644); err == nil {
		return fmt.Errorf("the sources can be written")
	}
	dir, err := os.MkdirTemp("", "overlay")
	if err != nil {
		return err
	}
	for _, name := range []string{"upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=/etc,upperdir=%s/upper,workdir=%s/work", dir, dir)
	if err := syscall.Mount("overlay", filepath.Join(dir, "merged"), "overlay", 0, options); err != nil {
		return &os.PathError{Op: "mount", Path: options, Err: err}
	}
	return nil
}
