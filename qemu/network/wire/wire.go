// Package wire is a network cable with faults. It carries Ethernet frames between two tap
// interfaces, and delays some and drops others.
//
// The kernel can do the same (tc, netem, nftables), but many kernels are built without it.
// Every kernel that runs virtual machines has taps. A tap gets frames as they would be on a
// real cable, segmented and with their checksums. That costs some speed, so a wire is used
// only for a network with faults.
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
	// underway is the largest number of frames on the cable, in each direction: at 1500
	// bytes, those of 100 Mbit/s and a delay of 250 ms. Further frames are dropped, as in a
	// switch whose buffer is full.
	underway = 2048
)

// HeaderSize is the size of a frame's header: two addresses of six bytes, and a type.
const HeaderSize = 14

// Conditions are the faults in each direction. They must not change.
type Conditions struct {
	Delay  time.Duration
	Jitter time.Duration // at most so much is added to Delay; frames keep their order
	Loss   float64       // part of the frames, 0 to 1
	// Drop reports whether a frame is dropped; nil: none is.
	Drop func(frame []byte) bool
}

// Wire carries frames until it is closed.
type Wire struct {
	ends [2]*os.File
	gone chan struct{} // closed by Close: frames on their way are lost
	done sync.WaitGroup
}

// Open makes taps with these names, in the network namespace of the calling thread, and
// carries frames between them. The taps are down at first, and end with the wire.
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

// OpenTap makes a tap, in the network namespace of the calling thread. It ends with its
// last descriptor.
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

// Close removes the wire and its taps. It must be called once.
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

// late is a frame on its way.
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
				return // closed; a tap that is down only has no frames
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
			_, _ = to.Write(next.frame) // fails where the tap is down or gone
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
