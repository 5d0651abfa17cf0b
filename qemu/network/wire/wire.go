// Package wire is a bad network cable. It carries Ethernet frames between two tap
// interfaces, and is late with some and loses others on the way.
//
// The kernel has the same (tc, netem, nftables), and many kernels are built without.
// Every one that runs virtual machines has taps. A tap gets frames as they would be
// on a real cable, cut to size and with their checksums; that costs some speed, so a
// wire is put only where the network is to be bad.
package wire

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// frameMax is more than any frame has: an MTU of 9000 with headers.
	frameMax = 9216
	// underway is how many frames are on the cable at most, in each direction: at
	// 1500 bytes, those of 100 Mbit/s and a delay of 250 ms. What comes on top is lost,
	// as in a switch whose buffer is full.
	underway = 2048
)

// HeaderSize is what a frame begins with: two addresses of six bytes, and a type.
const HeaderSize = 14

// Conditions are how bad it is, in each direction. They must not change.
type Conditions struct {
	Delay  time.Duration
	Jitter time.Duration // up to so much on top of Delay; frames keep their order
	Loss   float64       // part of the frames, 0 to 1
	// Drop says of a frame whether it gets lost; nil: none does.
	Drop func(frame []byte) bool
}

// Wire carries frames until it is closed.
type Wire struct {
	ends [2]*os.File
	gone chan struct{} // closed with it: what is under way is lost
	done sync.WaitGroup
}

// Open makes taps with these names, in the network namespace of the thread that it is
// called on, and lays a wire between them. They aren't up yet, and go with the wire.
func Open(names [2]string, c Conditions) (*Wire, error) {
	w := &Wire{gone: make(chan struct{})}
	for i, name := range names {
		tap, err := OpenTap(name)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make tap %s: %w", name, err), w.Close())
		}
		w.ends[i] = tap
	}
	w.carry(w.ends[0], w.ends[1], c)
	w.carry(w.ends[1], w.ends[0], c)
	return w, nil
}

// OpenTap makes a tap, in the network namespace of the thread that it is called on. It
// goes with the last descriptor of it.
func OpenTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Close takes the wire and its taps away, once.
func (w *Wire) Close() error {
	close(w.gone)
	var errs []error
	for _, end := range w.ends {
		if end != nil {
			errs = append(errs, end.Close())
		}
	}
	w.done.Wait()
	return errors.Join(errs...)
}

// late is a frame that is under way.
type late struct {
	frame []byte
	due   time.Time
}

// carry moves frames in one direction.
func (w *Wire) carry(to, from *os.File, c Conditions) {
	cable := make(chan late, underway)
	w.done.Go(func() {
		defer close(cable)
		frame := make([]byte, frameMax)
		for {
			n, err := from.Read(frame)
			if err != nil {
				return // closed; a tap that is down only has nothing to say
			}
			if n < HeaderSize || c.lost(frame[:n]) {
				continue
			}
			select {
			case cable <- late{append([]byte(nil), frame[:n]...), time.Now().Add(c.delay())}:
			default:
			}
		}
	})
	w.done.Go(func() {
		for next := range cable {
			if wait := time.Until(next.due); wait > 0 {
				select {
				case <-time.After(wait):
				case <-w.gone:
					continue
				}
			}
			_, _ = to.Write(next.frame) // an end that is down or gone takes nothing
		}
	})
}

func (c Conditions) lost(frame []byte) bool {
	return c.Loss > 0 && rand.Float64() < c.Loss || c.Drop != nil && c.Drop(frame)
}

func (c Conditions) delay() time.Duration {
	if c.Jitter <= 0 {
		return c.Delay
	}
	return c.Delay + rand.N(c.Jitter)
}
