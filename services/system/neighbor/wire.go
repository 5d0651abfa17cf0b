package neighbor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Observed is a frame of another machine about the address.
type Observed struct {
	What Observation
	MAC  net.HardwareAddr
}

// Wire is a packet socket on a link that receives frames about one address.
type Wire struct {
	Index   int
	MAC     net.HardwareAddr
	address netip.Addr
	file    *os.File
	done    sync.WaitGroup
	Dead    chan struct{} // closed when it stops receiving
}

// On reports whether the kernel finds neighbours on a link by ARP and ND.
func On(l netlink.Link) bool {
	return len(l.Attrs().HardwareAddr) == macSize && l.Attrs().RawFlags&(unix.IFF_NOARP|unix.IFF_LOOPBACK) == 0
}

// Open listens on a link until close, or until the link is removed. receive must not
// block.
func Open(l netlink.Link, address netip.Addr, log *slog.Logger, receive func(Observed)) (_ *Wire, err error) {
	a := l.Attrs()
	if !On(l) {
		return nil, fmt.Errorf("%s is no Ethernet link: it has no neighbours by MAC address", a.Name)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	w := &Wire{Index: a.Index, MAC: a.HardwareAddr, address: address, file: os.NewFile(uintptr(fd), "packets of "+a.Name), Dead: make(chan struct{})}
	// The filter first: the socket receives nothing before it is bound.
	program := filter(address)
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: swapped(protocol(address)), Ifindex: a.Index})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen to %s: %w", a.Name, err), w.file.Close())
	}
	w.done.Go(func() {
		defer close(w.Dead)
		// Guard: any machine may send frames. After a panic the controller opens another wire.
		_ = dag.Guard(log, func() error { w.listen(receive); return nil })
	})
	return w, nil
}

func (w *Wire) listen(receive func(Observed)) {
	frame := make([]byte, longestReceive)
	for {
		n, err := w.file.Read(frame)
		if err != nil {
			return
		}
		if what, mac := read(frame[:n], w.address); what != Nothing && mac.String() != w.MAC.String() {
			receive(Observed{what, mac})
		}
	}
}

func (w *Wire) Close() error {
	err := w.file.Close()
	w.done.Wait()
	return err
}

func (w *Wire) Send(frames ...[]byte) error {
	var errs []error
	for _, f := range frames {
		if _, err := w.file.Write(f); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func protocol(address netip.Addr) uint16 {
	if address.Is4() {
		return typeARP
	}
	return typeIPv6
}

// swapped is a number in network byte order, as the kernel needs it.
func swapped(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// filter lets the kernel select the few needed frames, so that other traffic on the
// link doesn't wake PID 1. Classic BPF; offsets are from the start of the frame.
func filter(address netip.Addr) []unix.SockFilter {
	if address.Is4() {
		own := binary.BigEndian.Uint32(address.AsSlice())
		return []unix.SockFilter{
			load(unix.BPF_W, ethernetSize+14), // sender
			equal(own, 2, 0),
			load(unix.BPF_W, ethernetSize+24), // target
			equal(own, 0, 1),
			{Code: unix.BPF_RET | unix.BPF_K, K: longestReceive},
			{Code: unix.BPF_RET | unix.BPF_K},
		}
	}
	const message = ethernetSize + ip6Size
	own := address.AsSlice()
	program := []unix.SockFilter{
		load(unix.BPF_B, ethernetSize+6),
		equal(nextICMP6, 0, 12),
		load(unix.BPF_B, message),
		equal(solicitation, 1, 0),
		equal(advertisement, 0, 9),
	}
	for i := range 4 {
		left := uint8(6 - 2*i) // instructions to the last one
		program = append(program, load(unix.BPF_W, uint32(message+8+4*i)), equal(binary.BigEndian.Uint32(own[4*i:]), 0, left+1))
	}
	return append(program,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: longestReceive},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K},
	)
}

func load(size uint16, offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | size | unix.BPF_ABS, K: offset}
}

// equal skips that many instructions if the loaded value is k, or isn't.
func equal(k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
}
