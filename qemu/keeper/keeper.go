// Package keeper is an OS thread that never ends, for what Linux binds to a thread
// rather than to a process.
//
// Two things are: a parent-death signal fires when the *thread* that started the
// child ends (prctl(2), PR_SET_PDEATHSIG), and Go ends threads as it likes; and a
// network namespace belongs to the thread that entered it. So children that must
// die with this process are started on a keeper, and a keeper may live in a network
// namespace of its own, which has no name anywhere and vanishes with its last
// user.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Keeper runs functions on its thread, one after the other.
type Keeper struct {
	work chan func()
	ns   *os.File // the network namespace, nil for the process' own
}

// New starts a thread in the network namespace of the process.
func New() *Keeper {
	k := &Keeper{work: make(chan func())}
	go onOwnThread(k.run)
	return k
}

// NewInNamespace starts a thread in a new, empty network namespace.
func NewInNamespace() (*Keeper, error) {
	k, err := newAt((*Keeper).enterNew)
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return k, nil
}

// NewIn starts a thread in the network namespace that a path leads to.
func NewIn(path string) (*Keeper, error) {
	k, err := newAt(func(k *Keeper) (err error) {
		if k.ns, err = os.Open(path); err != nil {
			return err
		}
		return k.enter()
	})
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}
	return k, nil
}

func newAt(enter func(*Keeper) error) (*Keeper, error) {
	k := &Keeper{work: make(chan func())}
	ready := make(chan error, 1)
	go onOwnThread(func() {
		err := enter(k)
		if ready <- err; err == nil {
			k.run()
		}
	})
	if err := <-ready; err != nil {
		if k.ns != nil {
			err = errors.Join(err, k.ns.Close())
		}
		return nil, err
	}
	return k, nil
}

func (k *Keeper) enter() error {
	if err := unix.Setns(int(k.ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return nil
}

func (k *Keeper) enterNew() (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	k.ns, err = os.Open("/proc/thread-self/ns/net")
	return err
}

// onOwnThread runs f on a thread that nobody else uses, and that ends with f. It
// isn't the first thread of the process, which Go never ends.
func onOwnThread(f func()) {
	runtime.LockOSThread() // not unlocked: Go then ends the thread with the goroutine
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	locked := make(chan struct{})
	go func() { // anywhere but here, as long as this thread is locked
		runtime.LockOSThread()
		close(locked)
		f()
	}()
	<-locked
	runtime.UnlockOSThread()
}

func (k *Keeper) run() {
	for f := range k.work {
		f()
	}
}

// Do runs f on the thread and waits for it.
func (k *Keeper) Do(f func() error) error {
	done := make(chan error)
	k.work <- func() { done <- f() }
	return <-done
}

// Close ends the thread, and with it the children that were started on it with a
// parent-death signal. Nobody may call Do afterwards.
func (k *Keeper) Close() error {
	close(k.work)
	if k.ns == nil {
		return nil
	}
	return k.ns.Close()
}

// Listen opens a TCP listener in the namespace.
func (k *Keeper) Listen(address string) (net.Listener, error) {
	var l net.Listener
	err := k.Do(func() (err error) {
		l, err = net.Listen("tcp4", address)
		return err
	})
	return l, err
}

// Dial connects to a numeric TCP address in the namespace. It doesn't block the
// thread: it visits the namespace with one that is thrown away afterwards.
func (k *Keeper) Dial(ctx context.Context, address string) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	dial := func() {
		if k.ns != nil {
			if err := k.enter(); err != nil {
				done <- result{nil, err}
				return
			}
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp4", address)
		done <- result{conn, err}
	}
	go onOwnThread(dial)
	r := <-done
	return r.conn, r.err
}
