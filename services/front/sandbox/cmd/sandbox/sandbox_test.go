package main

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

const goodSpec = `{"id":"c.n","hostname":"n","rootfs":"/r.sqsh","work":"/w","cgroup":"/garboard/c/n","args":["/sbin/init"],"console":"/c.log",
"binds":[{"source":"/s","target":"/var"}]}`

// The test binary is also the program, as that starts itself again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		for _, c := range commands {
			if c.name == os.Args[1] {
				main()
				return
			}
		}
	}
	os.Exit(m.Run())
}

func TestSpec(t *testing.T) {
	t.Parallel()
	if s, err := readSpec(strings.NewReader(goodSpec)); err != nil || s.Binds[0].Target != "/var" {
		t.Errorf("spec %+v, %v", s, err)
	}
	if _, err := readSpec(strings.NewReader(strings.Replace(goodSpec, `"id"`, `"idd":"x","id"`, 1))); err == nil || !strings.Contains(err.Error(), `unknown field "idd"`) {
		t.Errorf("an unknown key: %v", err)
	}
}

func TestHowEnded(t *testing.T) {
	t.Parallel()
	exited := func(code int) syscall.WaitStatus { return syscall.WaitStatus(code << 8) }
	for _, tc := range []struct {
		name   string
		status syscall.WaitStatus
		want   error
	}{
		{"exit 0", exited(0), nil},
		{"poweroff", syscall.WaitStatus(syscall.SIGINT), nil},
		{"reboot", syscall.WaitStatus(syscall.SIGHUP), nodeEnd(exitReboot)},
		{"killed", syscall.WaitStatus(syscall.SIGKILL), nodeEnd(exitKilled)},
		{"panic", exited(2), nodeEnd(exitDied)},
		{"crash", syscall.WaitStatus(syscall.SIGSEGV), nodeEnd(exitDied)},
	} {
		if got := howEnded(tc.status); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "usage: sandbox COMMAND"},
		{[]string{"fly"}, "usage: sandbox COMMAND"},
		{[]string{"node"}, "needs one spec"},
		{[]string{"node", "-"}, "must be started as the first process"},
		{[]string{"node-inside", "-"}, "is for node to call"},
		{[]string{"shield"}, "needs the node's root"},
		{[]string{"service"}, "needs one spec"},
		{[]string{"service", "/spec"}, "on standard input"},
		{[]string{"service-inside"}, "is for service to call"},
	} {
		if err := run(tc.args); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v; want %q", tc.args, err, tc.want)
		}
	}
}

// The clock and the kernel's code are the host's, whatever else a node may.
func TestNodeConfig(t *testing.T) {
	t.Parallel()
	spec := nodeSpec{ID: "c.n", Hostname: "n", Cgroup: "/garboard/c/n", NetDevice: "veth7", Binds: []bind{{"/a", "/x", true}, {"/b", "/y", false}}}
	c, err := nodeConfig(spec, "/root")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range c.Capabilities.Bounding {
		if name == "CAP_SYS_TIME" || name == "CAP_SYS_MODULE" {
			t.Errorf("a node has %s", name)
		}
	}
	for _, ns := range []configs.NamespaceType{configs.NEWNS, configs.NEWPID, configs.NEWIPC, configs.NEWUTS, configs.NEWNET, configs.NEWCGROUP} {
		if !c.Namespaces.IsPrivate(ns) {
			t.Errorf("namespace %s is the host's", ns)
		}
	}
	if c.NetDevices["veth7"].Name != "eth0" {
		t.Errorf("network devices: %v", c.NetDevices)
	}
	binds := c.Mounts[len(c.Mounts)-2:]
	if binds[0].Flags&unix.MS_RDONLY == 0 || binds[1].Flags&unix.MS_RDONLY != 0 {
		t.Errorf("binds: %+v", binds)
	}
	if len(nodeMounts) != len(c.Mounts)-2 {
		t.Error("the table of mounts has grown")
	}
}
