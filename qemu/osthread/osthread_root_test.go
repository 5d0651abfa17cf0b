package osthread

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"github.com/vishvananda/netlink"
)

func TestNamespaceIsApart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a network namespace")
	}
	thread, err := NewInNamespace()
	if err != nil {
		t.Fatal(err)
	}
	err = thread.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		t.Fatal(err)
	}
	at := freeport.Find(t).String() // free outside of the namespace, too
	l, err := thread.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "inside")
			conn.Close()
		}
	}()
	conn, err := thread.Dial(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	if text, _ := io.ReadAll(conn); string(text) != "inside" {
		t.Errorf("read %q", text)
	}
	// Outside of the namespace nothing listens at this address. There are many goroutines, so
	// that one would run on a thread that was not returned to this namespace.
	for range 4 * runtime.GOMAXPROCS(0) {
		if conn, err := net.Dial("tcp", at); err == nil {
			conn.Close()
			t.Fatal("connected to the listener in the namespace from outside")
		}
	}
	// A second thread in the same namespace.
	second, err := NewIn(fmt.Sprintf("/proc/self/fd/%d", thread.ns.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Listen(at); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("listen where the first one does: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if _, err := NewIn(os.DevNull); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("enter a file that is no namespace: %v", err)
	}
	l.Close()
	if _, err := thread.Dial(t.Context(), at); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after close: %v", err)
	}
	if err := thread.Close(); err != nil {
		t.Error(err)
	}
}

// A child with a parent-death signal runs as long as the thread, not as long as the goroutine
// that started it, and ends with the thread.
func TestChildrenEndWithTheThread(t *testing.T) {
	thread := New()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := thread.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	select {
	case err := <-exited:
		t.Fatalf("child ended early: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := thread.Close(); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 5*time.Second, "the child is killed", func() error {
		select {
		case <-exited:
			return nil
		default:
			return errors.New("it runs")
		}
	})
}

func TestDialEndsWithContext(t *testing.T) {
	thread := New()
	defer thread.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := thread.Dial(ctx, "127.0.0.1:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("dial: %v", err)
	}
}
