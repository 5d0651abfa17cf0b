// Command prober is a service for tests: it tries what a sandbox forbids, and says
// how that went.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if strings.HasPrefix(filepath.Base(os.Args[0]), "maker-") {
		maker(strings.TrimPrefix(filepath.Base(os.Args[0]), "maker-"))
		return
	}
	switch os.Args[1] {
	case "report":
		report(os.Args[2])
		wait()
	case "once":
		report(os.Args[2])
	case "serve":
		fmt.Println("ready")
		wait()
	case "stubborn":
		signal.Ignore(unix.SIGTERM)
		fmt.Println("ready")
		time.Sleep(time.Hour)
	case "exit":
		code, _ := strconv.Atoi(os.Args[2])
		fmt.Println("last words")
		os.Exit(code)
	case "hog":
		hog()
	case "threads":
		threads()
	}
}

func wait() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGTERM)
	<-c
	fmt.Println("asked to end")
}

// maker plays the sandbox program, badly.
func maker(how string) {
	switch how {
	case "silent":
		time.Sleep(time.Hour)
	case "garbage":
		fmt.Println("what?")
		wait()
	case "wrong":
		fmt.Println(`{"pid":1}`)
		wait()
	case "dead":
		fmt.Fprintln(os.Stderr, "sandbox: no luck today")
		os.Exit(1)
	}
}

func hog() {
	var all [][]byte
	for {
		b := make([]byte, 1<<20)
		for i := range b {
			b[i] = byte(i)
		}
		all = append(all, b)
		runtime.KeepAlive(all)
	}
}

func threads() {
	for range 80 {
		go func() {
			runtime.LockOSThread()
			var ts unix.Timespec
			ts.Sec = 3600
			_ = unix.Nanosleep(&ts, nil)
		}()
	}
	time.Sleep(time.Hour)
}

// report prints one JSON object. dir is a directory with a file "secret" in it.
func report(dir string) {
	result := map[string]string{
		"uid": fmt.Sprint(os.Getuid(), os.Geteuid()),
		"gid": fmt.Sprint(os.Getgid(), os.Getegid()),
	}
	groups, _ := os.Getgroups()
	result["groups"] = fmt.Sprint(len(groups))
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp":
			result[key] = strings.TrimSpace(value)
		}
	}
	for _, path := range []string{"/", "/dev", "/proc", dir} {
		result["ls "+path] = list(path)
	}
	if id, err := os.ReadFile("/proc/self/oom_score_adj"); err == nil {
		result["oom"] = strings.TrimSpace(string(id))
	}
	for _, ns := range []string{"mnt", "pid", "ipc", "uts", "cgroup", "user", "net"} {
		result["ns "+ns], _ = os.Readlink("/proc/self/ns/" + ns)
	}
	result["GOMEMLIMIT"] = os.Getenv("GOMEMLIMIT")
	for _, a := range attempts(dir) {
		result[a.name] = "allowed"
		if err := a.try(); err != nil {
			result[a.name] = err.Error()
		}
	}
	line, _ := json.Marshal(result)
	fmt.Println("report " + string(line))
}

func list(dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

type attempt struct {
	name string
	try  func() error
}

func attempts(dir string) []attempt {
	return []attempt{
		{"write /", func() error { return write("/garboard-prober") }},
		{"write dir", func() error { return write(dir + "/written") }},
		{"write itself", func() error { f, err := os.OpenFile(os.Args[0], os.O_WRONLY, 0); return closed(f, err) }},
		{"write /dev", func() error { return write("/dev/garboard-prober") }},
		{"write /tmp", func() error { return write("/tmp/garboard-prober") }},
		{"read secret", func() error { _, err := os.ReadFile(dir + "/secret"); return err }},
		{"change settings", func() error {
			f, err := os.OpenFile("/proc/sys/kernel/hostname", os.O_WRONLY, 0)
			return closed(f, err)
		}},
		{"read /sys", func() error { _, err := os.ReadDir("/sys/kernel"); return err }},
		{"read the kernel's command line", func() error {
			data, err := os.ReadFile("/proc/cmdline")
			if err == nil && len(data) == 0 {
				return errors.New("empty")
			}
			return err
		}},
		{"use /dev/null", func() error { return os.WriteFile("/dev/null", []byte("x"), 0) }},
		{"use urandom", func() error {
			f, err := os.Open("/dev/urandom")
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.Read(make([]byte, 8))
			return err
		}},
		{"listen", func() error {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			return l.Close()
		}},
		{"interfaces", func() error { _, err := net.Interfaces(); return err }},
		{"connect unix", func() error {
			c, err := net.Dial("unix", "/proc/self/fd/3")
			if err != nil {
				return err
			}
			return c.Close()
		}},
		{"packet socket", func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0) }},
		{"raw socket", func() error { return socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP) }},
		{"netfilter socket", func() error { return socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER) }},
		{"unshare", func() error { return inThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }) }},
		{"keyctl", func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); return err }},
		{"prctl", func() error { _, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); return err }},
		{"fork", func() error {
			p, err := os.StartProcess(os.Args[0], []string{os.Args[0], "exit", "0"}, &os.ProcAttr{})
			if err != nil {
				return err
			}
			_, err = p.Wait()
			return err
		}},
		{"ioctl", func() error {
			f, err := os.Open("/dev/null")
			if err != nil {
				return err
			}
			defer f.Close()
			// ENOTTY is the answer of the device: the call was made.
			if _, err = unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ); err == unix.ENOTTY {
				return nil
			}
			return err
		}},
		// Last, as it may hide this program.
		{"mount", func() error { return inThread(func() error { return unix.Mount("x", "/tmp", "tmpfs", 0, "") }) }},
	}
}

func write(path string) error {
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		return err
	}
	return os.Remove(path)
}

func closed(f *os.File, err error) error {
	if err != nil {
		return err
	}
	return f.Close()
}

func socket(domain, kind, protocol int) error {
	fd, err := unix.Socket(domain, kind, protocol)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// inThread runs f in a thread that ends with it, as f may change it.
func inThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}
