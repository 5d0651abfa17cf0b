// Package osthread runs functions on an OS thread that ends only when it is closed.
//
// Linux binds two things to a thread and not to a process. A parent-death signal is sent
// when the *thread* that started the child ends (prctl(2), PR_SET_PDEATHSIG), and Go ends
// threads at any time. A network namespace belongs to the thread that entered it. So
// children that must end with this process are started on a Thread. A Thread can have a
// network namespace of its own. This namespace has no name, and the kernel removes it
// together with its last user.
package osthread

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Thread runs functions on one OS thread, one after the other.
type Thread struct {
	work chan func()
	ns   *os.File // the network namespace, nil: that of the process
}

// New starts a thread in the network namespace of the process.
func New() *Thread {
	t := &Thread{work: make(chan func())}
	go onOwnThread(t.run)
	return t
}

// NewInNamespace starts a thread in a new, empty network namespace.
func NewInNamespace() (*Thread, error) { return NewIn("") }

// NewIn starts a thread in the network namespace at a path, such as /proc/PID/ns/net; "": in
// a new, empty one.
func NewIn(path string) (*Thread, error) {
	t := &Thread{work: make(chan func())}
	ready := make(chan error, 1)
	go onOwnThread(func() {
		err := t.join(path)
		if ready <- err; err == nil {
			t.run()
		}
	})
	if err := <-ready; err != nil {
		if t.ns != nil {
			err = errors.Join(err, t.ns.Close())
		}
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}
	return t, nil
}

// join is called on the thread.
func (t *Thread) join(path string) (err error) {
	if path == "" {
		path = "/proc/thread-self/ns/net"
		err = unix.Unshare(unix.CLONE_NEWNET)
	}
	if err == nil {
		t.ns, err = os.Open(path)
	}
	if err == nil {
		err = t.enter()
	}
	return err
}

func (t *Thread) enter() error {
	if err := unix.Setns(int(t.ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return nil
}

// onOwnThread runs f on a thread that runs nothing else and ends with f. It is not the first
// thread of the process, because Go never ends that one.
func onOwnThread(f func()) {
	runtime.LockOSThread() // not unlocked: Go then ends the thread with the goroutine
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	locked := make(chan struct{})
	go func() { // on another thread, because this one is locked
		runtime.LockOSThread()
		close(locked)
		f()
	}()
	<-locked
	runtime.UnlockOSThread()
}

func (t *Thread) run() {
	for f := range t.work {
		f()
	}
}

// Do runs f on the thread and waits for it.
func (t *Thread) Do(f func() error) error {
	done := make(chan error)
	t.work <- func() { done <- f() }
	return <-done
}

// Close ends the thread, and with it the children that were started on it with a
// parent-death signal. Do must not be called afterwards.
func (t *Thread) Close() error {
	close(t.work)
	if t.ns == nil {
		return nil
	}
	return t.ns.Close()
}

// Listen opens a TCP listener in the namespace of the thread.
func (t *Thread) Listen(address string) (net.Listener, error) {
	var l net.Listener
	err := t.Do(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// Dial connects to a numeric TCP address in the namespace. It does not block the thread: it
// enters the namespace with another thread, which ends afterwards.
func (t *Thread) Dial(ctx context.Context, address string) (conn net.Conn, err error) {
	done := make(chan struct{})
	go onOwnThread(func() {
		defer close(done)
		if t.ns != nil {
			err = t.enter()
		}
		if err == nil {
			conn, err = new(net.Dialer).DialContext(ctx, "tcp", address)
		}
	})
	<-done
	return conn, err
}
