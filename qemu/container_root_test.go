package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/container"
	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts and cgroups")
	}
}

// goBuild builds a program of this module once per test run.
func goBuild(t *testing.T, out string, env []string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", append([]string{"build", "-o", out}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build %v: %v\n%s", args, err, text)
	}
}

var (
	buildOnce sync.Once
	built     Boot
)

// artefacts are the sandbox program and a squashfs with the test's init, and an
// empty image layout.
func artefacts(t *testing.T) Options {
	t.Helper()
	needRoot(t)
	buildOnce.Do(func() {
		dir, err := os.MkdirTemp("", "garboard-test-")
		if err != nil {
			t.Fatal(err)
		}
		removeAtEnd = append(removeAtEnd, dir)
		root := filepath.Join(dir, "root")
		for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "var", "system/state", "sbin"} {
			if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		goBuild(t, filepath.Join(root, "sbin/init"), []string{"CGO_ENABLED=0"}, "./testdata/init")
		goBuild(t, filepath.Join(dir, "sandbox"), []string{"CGO_ENABLED=1"},
			"-tags", "netgo osusergo seccomp", "-ldflags", "-s -w -linkmode external -extldflags=-static", "../services/front/sandbox/cmd/sandbox")
		image := filepath.Join(dir, "root.sqsh")
		if text, err := exec.Command("mksquashfs", root, image, "-quiet", "-no-progress").CombinedOutput(); err != nil {
			t.Fatalf("mksquashfs: %v\n%s", err, text)
		}
		built = Boot{Rootfs: image, Sandbox: filepath.Join(dir, "sandbox")}
	})
	// The first cluster after the start of the machine does this, and the setting stays.
	if err := container.RaiseInotifyLimit(slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	images := t.TempDir()
	if err := os.WriteFile(filepath.Join(images, "index.json"), []byte(`{"schemaVersion":2,"manifests":[]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	return Options{Provisioner: Container, Boot: built, Images: images, Self: []string{os.Args[0]}}
}

// up starts a cluster that is removed at the end of the test.
func up(t *testing.T, o Options) *Cluster {
	t.Helper()
	t.Cleanup(func() {
		if err := Down(context.Background(), o.Name); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	c, err := Up(t.Context(), o)
	if err != nil {
		t.Fatalf("up: %v", err)
	}
	return c
}

// tellNode sends a line to the test's init, through the forwarded port.
func tellNode(c *Cluster, line string) (string, error) {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", c.KubernetesPort))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintln(conn, line)
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(answer), err
}

func expect(t *testing.T, c *Cluster, line, want string) {
	t.Helper()
	eventually.That(t, 10*time.Second, fmt.Sprintf("%q is answered with %q", line, want), func() error {
		got, err := tellNode(c, line)
		if err != nil {
			return err
		}
		if !strings.Contains(got, want) {
			return fmt.Errorf("answer %q", got)
		}
		return nil
	})
}

func state(t *testing.T, c *Cluster, want string) {
	t.Helper()
	eventually.That(t, 10*time.Second, "node is "+want, func() error {
		s, err := c.Status(t.Context())
		if err != nil {
			return err
		}
		if s[0].State != want {
			return fmt.Errorf("it is %q", s[0].State)
		}
		return nil
	})
}

func TestContainerNodeLeavesNothing(t *testing.T) {
	o := artefacts(t)
	o.Name = "leaves-nothing"
	t.Setenv("GARBOARD_HOME", t.TempDir())
	before, began := snapshot.Take(t, o.Name), time.Now()
	c := up(t, o)
	expect(t, c, "who", "leaves-nothing-controlplane-1 boot 1")
	expect(t, c, "get http://10.5.0.1:5000/v2/", "200 OK {}")

	// The kubelet's settings affect only the node; those of the whole machine
	// can't be written; the node's own can.
	expect(t, c, "write /proc/sys/vm/overcommit_memory 1", "1 <nil>")
	expect(t, c, "write /proc/sys/kernel/panic 17", "17 <nil>")
	expect(t, c, "write /proc/sys/vm/swappiness 17", "read-only file system")
	expect(t, c, "write /proc/sys/net/ipv4/ip_forward 1", "1 <nil>")
	expect(t, c, "write /proc/sys/kernel/shmmni 17", "17 <nil>")
	expect(t, c, "write /etc-is-read-only x", "read-only file system")

	used, err := snapshot.CPUTime(c.Cgroup(c.Nodes[0].Name))
	if begun := time.Since(began); err != nil || used <= 0 || used > time.Duration(runtime.NumCPU())*begun {
		t.Errorf("within %s, the node has used %s of processor time: %v", begun, used, err)
	}

	if diff := before.Diff(snapshot.Take(t, o.Name), snapshot.Living...); diff != "" {
		t.Errorf("the host differs while the cluster is up:\n%s", diff)
	}
	if err := Down(t.Context(), o.Name); err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
		t.Errorf("the cluster left something behind:\n%s", diff)
	}
}

// S-332: a container gets the requested part of the machine.
func TestContainerLimits(t *testing.T) {
	o := artefacts(t)
	o.Name, o.CPUs, o.MemoryMiB = "limits", 1, 64
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := up(t, o)
	expect(t, c, "who", "limits-controlplane-1 boot 1")
	// Of both versions; one of them exists, and with it both files.
	checked := 0
	node := filepath.Join(c.dir.cgroup(), c.Nodes[0].Name)
	for _, want := range [][2]string{
		{"memory" + node + "/memory.limit_in_bytes", "67108864"}, {"cpu" + node + "/cpu.cfs_quota_us", "100000"},
		{node + "/memory.max", "67108864"}, {node + "/cpu.max", "100000 100000"},
	} {
		text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", want[0]))
		if err != nil {
			continue
		}
		checked++
		if strings.TrimSpace(string(text)) != want[1] {
			t.Errorf("%s is %s, not %s", want[0], text, want[1])
		}
	}
	if checked != 2 {
		t.Errorf("%d of 2 limits are there", checked)
	}
	if pids, err := snapshot.PIDs(c.Cgroup(c.Nodes[0].Name)); err != nil || len(pids) != 1 {
		t.Errorf("processes of the node: %v, %v", pids, err)
	}
	expect(t, c, "allocate 32", "32 MiB")
	_, _ = tellNode(c, "allocate 128") // it doesn't answer any more
	state(t, c, "power cut")           // the kernel has killed it
}

// After a kill of the host process no process of the cluster runs; the next Up finds the state.
func TestContainerHostProcessKilled(t *testing.T) {
	o := artefacts(t)
	o.Name = "host-killed"
	t.Setenv("GARBOARD_HOME", t.TempDir())
	before := snapshot.Take(t, o.Name)
	c := up(t, o)
	expect(t, c, "who", "boot 1")
	pid, err := c.HostPID()
	if err != nil || pid == 0 {
		t.Fatalf("host process: %d, %v", pid, err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 5*time.Second, "all is gone but cgroups", func() error {
		if diff := before.Diff(snapshot.Take(t, o.Name), snapshot.Cgroups); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	if c, err = Up(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "who", "boot 2")
	if err := Down(t.Context(), o.Name); err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
		t.Errorf("left behind:\n%s", diff)
	}
}

func TestContainerClustersSideBySide(t *testing.T) {
	o := artefacts(t)
	t.Setenv("GARBOARD_HOME", t.TempDir())
	a, b := o, o
	a.Name, b.Name = "side-a", "side-b"
	ca, cb := up(t, a), up(t, b)
	expect(t, ca, "who", "side-a-controlplane-1 boot 1")
	expect(t, cb, "who", "side-b-controlplane-1 boot 1")
	if err := Down(t.Context(), a.Name); err != nil {
		t.Fatal(err)
	}
	expect(t, cb, "who", "side-b-controlplane-1 boot 1")
	if _, err := Open(a.Name); !errors.Is(err, ErrNoCluster) {
		t.Errorf("open a removed cluster: %v", err)
	}
}

// Two clusters of one name, in two homes, are independent. A home may be
// relative to the working directory.
func TestContainersOfOneNameInTwoHomes(t *testing.T) {
	o := artefacts(t)
	o.Name = "twins"
	t.Chdir(t.TempDir())
	homes := [2]string{"mine", t.TempDir()}
	ups := [2]*Cluster{}
	for i, home := range homes {
		t.Setenv("GARBOARD_HOME", home)
		ups[i] = up(t, o)
		expect(t, ups[i], "who", "boot 1")
	}
	if err := Down(t.Context(), o.Name); err != nil {
		t.Error(err)
	}
	expect(t, ups[0], "who", "boot 1")
	t.Setenv("GARBOARD_HOME", homes[0]) // for what up does at the end
}

// A node that was frozen when its host process was killed does not stop the next Up.
func TestFrozenNodeOfADeadHost(t *testing.T) {
	for name, then := range map[string]func(context.Context, Options) error{
		"destroyed": func(ctx context.Context, o Options) error { return Down(ctx, o.Name) },
		"up again":  func(ctx context.Context, o Options) error { _, err := Up(ctx, o); return err },
	} {
		t.Run(name, func(t *testing.T) {
			o := artefacts(t)
			o.Name = "dead-host"
			t.Setenv("GARBOARD_HOME", t.TempDir())
			before := snapshot.Take(t, o.Name)
			c := up(t, o)
			expect(t, c, "who", "boot 1")
			if err := c.Freeze(t.Context(), c.Nodes[0].Name); err != nil {
				t.Fatal(err)
			}
			pid, err := c.HostPID()
			if err != nil || pid == 0 {
				t.Fatalf("host process: %d, %v", pid, err)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if err := then(t.Context(), o); err != nil {
				t.Error(err)
			}
			if err := Down(t.Context(), o.Name); err != nil {
				t.Fatal(err)
			}
			// Processes without a parent are reaped later.
			eventually.That(t, 10*time.Second, "nothing is left behind", func() error {
				if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
					return errors.New(diff)
				}
				return nil
			})
		})
	}
}

func TestContainerSwitches(t *testing.T) {
	o := artefacts(t)
	o.Name = "switches"
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := up(t, o)
	name := c.Nodes[0].Name
	ctx := t.Context()
	expect(t, c, "who", "boot 1")

	_, _ = tellNode(c, "reboot") // it doesn't answer any more
	expect(t, c, "who", "boot 2")

	if err := c.Cut(ctx, name); err != nil {
		t.Fatal(err)
	}
	state(t, c, "power cut")
	if err := c.On(ctx, name); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "who", "boot 3")

	if err := c.Off(ctx, name); err != nil {
		t.Fatal(err)
	}
	state(t, c, "off")
	if text := ReadLast(c.Console(name), 100); !strings.HasSuffix(text, "powering off\n") {
		t.Errorf("console ends with %q", text)
	}
	again, err := Up(ctx, o) // starts what is off
	if err != nil {
		t.Fatal(err)
	}
	expect(t, again, "who", "boot 4")

	// The node gets a second press, too: it isn't a power cut.
	expect(t, c, "write /run/stay yes", "yes")
	first := make(chan error, 1)
	go func() { first <- c.Off(ctx, name) }()
	eventually.That(t, 10*time.Second, "the node is pressed", func() error {
		if text := ReadLast(c.Console(name), 100); !strings.HasSuffix(text, "pressed once\n") {
			return fmt.Errorf("console ends with %q", text)
		}
		return nil
	})
	if err := errors.Join(c.Off(ctx, name), <-first); err != nil {
		t.Fatal(err)
	}
	state(t, c, "off")
	if text := ReadLast(c.Console(name), 100); !strings.HasSuffix(text, "powering off\n") {
		t.Errorf("console ends with %q", text)
	}
	if err := c.On(ctx, name); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "who", "boot 5")
	if !c.Made || !c.Started || again.Made || again.Started {
		t.Errorf("made and started: %v, %v; then %v, %v: who interrupts the second Up removes what the first made", c.Made, c.Started, again.Made, again.Started)
	}

	if err := c.Freeze(ctx, name); err != nil {
		t.Fatal(err)
	}
	state(t, c, "frozen")
	if err := c.Thaw(ctx, name); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "who", "boot 5")
	if err := c.Freeze(ctx, name); err != nil {
		t.Fatal(err)
	}
	// A frozen cluster can be removed, too.
	if err := Down(ctx, o.Name); err != nil {
		t.Fatal(err)
	}
}

// The same on a host that has only cgroup v2. (Where the controllers are with v1, it
// has none; the rest is the same.)
func TestContainersWithCgroupV2(t *testing.T) {
	needRoot(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^Test(ContainerNodeLeavesNothing|ContainerHostProcessKilled|ContainerSwitches|FrozenNodeOfADeadHost)$", "-test.v")
	cmd.Env = append(os.Environ(), onlyV2+"=1")
	// Go makes the mounts of the new namespace private.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count("\n"+string(out), "\n--- PASS") != 4 {
		t.Errorf("%v\n%s", err, out)
	}
}

// After Ctrl-C while a cluster is made, nothing remains of it.
func TestContainerUpInterrupted(t *testing.T) {
	o := artefacts(t)
	o.Name = "interrupted"
	home := t.TempDir()
	t.Setenv("GARBOARD_HOME", home)
	before := snapshot.Take(t, o.Name)
	ctx, cancel := context.WithCancel(t.Context())
	o.Self = []string{"/bin/sh", "-c", "sleep 1000"} // never gets ready
	done := make(chan error, 1)
	go func() {
		_, err := Up(ctx, o)
		done <- err
	}()
	eventually.That(t, 10*time.Second, "the host process is started", func() error {
		_, err := os.Stat(filepath.Join(home, "clusters", o.Name, "host.log"))
		return err
	})
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("up: %v", err)
	}
	if _, err := os.Stat(filepath.Join(home, "clusters", o.Name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
	if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
		t.Errorf("left behind:\n%s", diff)
	}
}

// A cluster that can't start reports the reason, in one line, and leaves nothing.
func TestContainerUpBroken(t *testing.T) {
	o := artefacts(t)
	t.Setenv("GARBOARD_HOME", t.TempDir())
	for _, tc := range []struct {
		name, want string
		change     func(*Options)
	}{
		{"no-rootfs", "keep /nowhere for the cluster: lstat /nowhere: no such file or directory", func(o *Options) { o.Boot.Rootfs = "/nowhere" }},
		{"no-squashfs", "/rootfs: invalid argument", func(o *Options) { o.Boot.Rootfs = o.Boot.Sandbox }},
		{"no-sandbox", "/nowhere: no such file or directory", func(o *Options) { o.Boot.Sandbox = "/nowhere" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := o
			o.Name = tc.name
			tc.change(&o)
			before := snapshot.Take(t, o.Name)
			_, err := Up(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("up: %v; want one line with %q", err, tc.want)
			}
			if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
				t.Errorf("left behind:\n%s", diff)
			}
		})
	}
}
