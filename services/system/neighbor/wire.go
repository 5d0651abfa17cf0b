package neighbor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/mdlayher/packet"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv6"
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
	conn    *packet.Conn
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
	protocol := map[bool]int{true: unix.ETH_P_ARP, false: unix.ETH_P_IPV6}[address.Is4()]
	conn, err := packet.Listen(&net.Interface{Index: a.Index}, packet.Raw, protocol, &packet.Config{Filter: filter(address)})
	if err != nil {
		return nil, fmt.Errorf("listen to %s: %w", a.Name, err)
	}
	w := &Wire{Index: a.Index, MAC: a.HardwareAddr, address: address, conn: conn, Dead: make(chan struct{})}
	go func() {
		defer close(w.Dead)
		// Guard: any machine may send frames. After a panic the controller opens another wire.
		_ = dag.Guard(log, func() error { w.listen(receive); return nil })
	}()
	return w, nil
}

func (w *Wire) listen(receive func(Observed)) {
	frame := make([]byte, longestReceive)
	for {
		n, _, err := w.conn.ReadFrom(frame)
		if err != nil {
			return
		}
		if what, mac := read(frame[:n], w.address); what != Nothing && mac.String() != w.MAC.String() {
			receive(Observed{what, mac})
		}
	}
}

func (w *Wire) Close() error {
	err := w.conn.Close()
	<-w.Dead
	return err
}

func (w *Wire) Send(frames ...[]byte) error {
	var errs []error
	for _, f := range frames {
		_, err := w.conn.WriteTo(f, &packet.Addr{HardwareAddr: f[:macSize]})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// filter lets the kernel select the few needed frames, so that other traffic on the
// link doesn't wake PID 1. Offsets are from the start of the frame. Of an IPv6 address, the end is enough.
func filter(address netip.Addr) []bpf.RawInstruction {
	const message = ethernetSize + ipv6.HeaderLen
	own := address.AsSlice()
	last := binary.BigEndian.Uint32(own[len(own)-4:])
	// sender, target
	program := []bpf.Instruction{load(4, ethernetSize+14), equal(last, 2, 0), load(4, ethernetSize+24), equal(last, 0, 1)}
	if address.Is6() {
		program = []bpf.Instruction{load(1, ethernetSize+6), equal(unix.IPPROTO_ICMPV6, 0, 6),
			load(1, message), equal(uint32(ipv6.ICMPTypeNeighborSolicitation), 1, 0), equal(uint32(ipv6.ICMPTypeNeighborAdvertisement), 0, 3),
			load(4, message+8+12), equal(last, 0, 1)}
	}
	// all can be written
	raw, _ := bpf.Assemble(append(program, bpf.RetConstant{Val: longestReceive}, bpf.RetConstant{}))
	return raw
}

func load(size int, offset uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: offset, Size: size} }

// equal skips that many instructions if the loaded value is k, or isn't.
func equal(k uint32, yes, no uint8) bpf.Instruction {
	return bpf.JumpIf{Cond: bpf.JumpEqual, Val: k, SkipTrue: yes, SkipFalse: no}
}
