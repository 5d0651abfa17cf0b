package wire

import (
	"bytes"
	"fmt"
	"math/bits"
	"net"
	"os"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// end is a program at one end of a wire, in a namespace of the test.
type end struct {
	t  *testing.T
	fd int
}

func ends(t *testing.T, c Conditions) (a, b end) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: taps in a network namespace")
	}
	thread, err := osthread.NewInNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { thread.Close() })
	var w *Wire
	err = thread.Do(func() (err error) {
		w, err = Open([2]string{"a", "b"}, c)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	open := func(name string) (e end) {
		e.t = t
		err := thread.Do(func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(link); err != nil {
				return err
			}
			protocol := bits.ReverseBytes16(experimental) // network byte order
			if e.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol)); err != nil {
				return err
			}
			timeout := unix.NsecToTimeval(silence.Nanoseconds())
			if err := unix.SetsockoptTimeval(e.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
				return err
			}
			return unix.Bind(e.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Attrs().Index})
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(e.fd) })
		return e
	}
	return open("a"), open("b")
}

const (
	// experimental is an EtherType for local experiments (IEEE 802).
	experimental = 0x88b5
	// silence is the time after which no more frames arrive.
	silence = 3 * time.Second
)

func (e end) send(to string, text string) {
	e.t.Helper()
	address, err := net.ParseMAC(to)
	if err != nil {
		e.t.Fatal(err)
	}
	frame := append(address, 2, 0, 0, 0, 0, 1, experimental>>8, experimental&0xff)
	frame = append(frame, fmt.Sprintf("%-50s", text)...)
	if _, err := unix.Write(e.fd, frame); err != nil {
		e.t.Fatal(err)
	}
}

// receive is the text of the next frame, "" if none comes.
func (e end) receive() string {
	frame := make([]byte, frameMax)
	n, _, err := unix.Recvfrom(e.fd, frame, 0)
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(frame[HeaderSize:n]))
}

func TestWireCarries(t *testing.T) {
	a, b := ends(t, Conditions{})
	a.send("02:00:00:00:00:02", "there")
	if got := b.receive(); got != "there" {
		t.Errorf("received %q", got)
	}
	b.send("02:00:00:00:00:01", "back")
	if got := a.receive(); got != "back" {
		t.Errorf("received %q", got)
	}
}

func TestWireIsLateInOrder(t *testing.T) {
	const delay, jitter = 100 * time.Millisecond, 50 * time.Millisecond
	a, b := ends(t, Conditions{Delay: delay, Jitter: jitter})
	start := time.Now()
	for i := range 20 {
		a.send("02:00:00:00:00:02", fmt.Sprint(i))
	}
	for i := range 20 {
		if got := b.receive(); got != fmt.Sprint(i) {
			t.Fatalf("frame %d is %q", i, got)
		}
	}
	if took := time.Since(start); took < delay {
		t.Errorf("after %s already", took)
	}
}

func TestWireLoses(t *testing.T) {
	a, b := ends(t, Conditions{Loss: 0.5, Drop: func(frame []byte) bool { return frame[5] == 9 }})
	for range 200 {
		a.send("02:00:00:00:00:02", "maybe")
		a.send("02:00:00:00:00:09", "never")
	}
	received := 0
	for text := b.receive(); text != ""; text = b.receive() {
		received++
		if text == "never" {
			t.Fatal("received what must be dropped")
		}
	}
	// Eleven standard deviations away from 100 can't be chance.
	if received < 20 || received > 180 {
		t.Errorf("received %d of 200", received)
	}
}

// A repair of the network, or a restart of the node, doesn't wait for frames on their way.
func TestWireClosesAtOnce(t *testing.T) {
	var closing time.Time
	t.Run("open", func(t *testing.T) {
		seen := make(chan struct{}, 2)
		a, _ := ends(t, Conditions{Delay: time.Minute, Drop: func([]byte) bool {
			select {
			case seen <- struct{}{}:
			default:
			}
			return false
		}})
		// When the second one arrives, the first is on its way.
		for range 2 {
			a.send("02:00:00:00:00:02", "late")
			<-seen
		}
		closing = time.Now()
	})
	if err := eventually.Took(closing, time.Now(), 10*time.Second); err != nil {
		t.Errorf("closed: %v", err)
	}
}
