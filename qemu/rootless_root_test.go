package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/qemu/network"
	"golang.org/x/sys/unix"
)

// nobody is a user without any rights.
const nobody = 65534

// A network of machines needs no root: the host process of any user can make it. It needs a
// /dev/net/tun that all users may open, as udev makes it. The test runs as root to make one.
func TestNetworkWithoutRoot(t *testing.T) {
	needRoot(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "without-root", "prepare")
	// Go makes the mounts of the new namespace private.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "connected\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

// withoutRoot is that test in processes of its own: one with the device, and below it one
// with the network, which is started like a user's host process.
func withoutRoot(ctx context.Context, step string) error {
	if step == "prepare" {
		err := errors.Join(
			unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, ""),
			unix.Mknod("/dev/net/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200))),
			os.Chmod("/dev/net/tun", 0o666))
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "without-root", "network")
		cmd.Dir = "/"
		cmd.SysProcAttr = hostAttributes(nobody, nobody, Container)
		// The process of a real user has this already.
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true}
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		return cmd.Run()
	}
	if _, err := os.ReadDir("/proc/1/fd"); err == nil {
		return errors.New("this process has rights outside of its namespace: it can read the files of PID 1")
	}
	p := testPlan(QEMU)
	nodes, err := p.lan(clusterDir(os.TempDir()))
	if err != nil {
		return err
	}
	l, err := network.New(nodes, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer l.Close()
	dhcpd, err := l.ServeDHCP()
	if err != nil {
		return err
	}
	defer dhcpd.Close()
	cable, err := l.Tap(p.Nodes[0].onLAN())
	if err != nil {
		return err
	}
	defer cable.Close()
	// A port in the network, as the load balancer has one.
	port, err := l.Listen(network.RegistryAddress(p.Network))
	if !errors.Is(err, unix.EADDRINUSE) { // the registry is there
		return errors.Join(fmt.Errorf("listen where the registry does: %w", err), port.Close())
	}
	var conn net.Conn
	if conn, err = l.Thread().Dial(ctx, network.RegistryAddress(p.Network).String()); err != nil {
		return err
	}
	fmt.Println("connected")
	return conn.Close()
}
