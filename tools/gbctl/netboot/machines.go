package netboot

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// report writes a line for each thing that a machine does.
type report struct {
	mu  sync.Mutex // guards out
	out io.Writer
	now func() time.Time
}

func (r *report) line(who, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.out, "%s %s %s\n", r.now().Format(time.TimeOnly), who, fmt.Sprintf(format, args...))
}

// machines is what DHCP tells about machines: TFTP and HTTP see only their addresses.
type machines struct {
	mu        sync.Mutex // guards all below
	byAddress map[netip.Addr]net.HardwareAddr
	byUUID    map[string]net.HardwareAddr     // nil: of several network cards
	asked     map[string]dhcpv4.TransactionID // by hardware address: the last question that was reported
}

func newMachines() machines {
	return machines{byAddress: map[netip.Addr]net.HardwareAddr{}, byUUID: map[string]net.HardwareAddr{}, asked: map[string]dhcpv4.TransactionID{}}
}

// learn remembers who sent a question. It reports whether the question is new: a machine repeats one until it has an
// answer.
func (m *machines) learn(q *dhcpv4.DHCPv4) (isNew bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, ip := range []net.IP{q.RequestedIPAddress(), q.ClientIPAddr} {
		if a, ok := netip.AddrFromSlice(ip.To4()); ok && !a.IsUnspecified() {
			m.byAddress[a] = q.ClientHWAddr
		}
	}
	if id := machineUUID(q); id != "" {
		if known, seen := m.byUUID[id]; seen && known.String() != q.ClientHWAddr.String() {
			m.byUUID[id] = nil
		} else {
			m.byUUID[id] = q.ClientHWAddr
		}
	}
	last, known := m.asked[q.ClientHWAddr.String()]
	m.asked[q.ClientHWAddr.String()] = q.TransactionID
	return !known || last != q.TransactionID
}

// name is the hardware address of a machine where it is known, and else its address. peer is its address and port.
func (m *machines) name(peer string) string {
	from, err := netip.ParseAddrPort(peer)
	if err != nil {
		return peer
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if mac := m.byAddress[from.Addr()]; mac != nil {
		return mac.String()
	}
	return from.Addr().String()
}

// bootedFrom is the hardware address of the network card from which the machine with a UUID booted, or "". Some vendors
// give all their machines one UUID: then none of their cards is meant.
func (m *machines) bootedFrom(uuid string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.byUUID[uuid].String()
}

// machineUUID is what RFC 4578, 2.3 calls the client machine identifier, as Linux writes it: the first three fields are
// little-endian (SMBIOS 3.7, 7.2.1).
func machineUUID(q *dhcpv4.DHCPv4) string {
	b := q.Options.Get(dhcpv4.OptionClientMachineIdentifier)
	if len(b) != 17 || b[0] != 0 {
		return ""
	}
	b = b[1:]
	return fmt.Sprintf("%x-%x-%x-%x-%x", []byte{b[3], b[2], b[1], b[0]}, []byte{b[5], b[4]}, []byte{b[7], b[6]}, b[8:10], b[10:])
}

// progressEvery is how often a transfer reports that it goes on.
const progressEvery = 10 * time.Second

// progress reports a transfer of a file to a machine.
type progress struct {
	report     *report
	who, name  string
	protocol   string
	size, done int64
	start, at  time.Time
}

func (r *report) progress(who, name, protocol string, size int) *progress {
	now := r.now()
	return &progress{report: r, who: who, name: name, protocol: protocol, size: int64(size), start: now, at: now}
}

// reached is called with the number of bytes that were sent.
func (p *progress) reached(n int64) {
	if p.done == 0 && n > 0 {
		p.report.line(p.who, "loads %s by %s (%s)", p.name, p.protocol, amount(p.size))
	}
	p.done = n
	if now := p.report.now(); now.Sub(p.at) >= progressEvery {
		p.at = now
		p.report.line(p.who, "loads %s: %d %% of %s", p.name, 100*n/max(p.size, 1), amount(p.size))
	}
}

// end reports the end, and why it came before all was sent. Before the first byte a client may only have asked for the
// size.
func (p *progress) end(err error) {
	switch took := p.report.now().Sub(p.start); {
	case p.done == 0 && p.size > 0:
	case p.done < p.size:
		p.report.line(p.who, "stopped loading %s at %s of %s: %v", p.name, amount(p.done), amount(p.size), err)
	default:
		p.report.line(p.who, "has loaded %s in %.1f s", p.name, took.Seconds())
	}
}

func amount(n int64) string {
	if n < 1e5 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}
