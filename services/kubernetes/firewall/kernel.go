package firewall

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
)

const (
	accept = config.FirewallAccept
	drop   = config.FirewallDrop

	// priority is before the usual filters (0): an accept of ours ends no other table's look at a packet, and a drop of
	// ours is final.
	priority = nftables.ChainPriority(-5)
	// kernelTimeout: a kernel without nf_tables answers a batch of messages with fewer acknowledgements than are
	// awaited.
	kernelTimeout = 10 * time.Second
	// kernelBuffer has room for a transaction of all rules that a configuration may have, and for the acknowledgements
	// of its messages.
	kernelBuffer = 2 << 20
)

// hits are the counters of the rules by name.
type hits map[string]nftables.CounterObj

var table = nftables.Table{Name: "garboard", Family: nftables.TableFamilyINet}

// dial doesn't ask the kernel yet: each request opens a socket.
func dial() *nftables.Conn {
	c, _ := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetDeadline(time.Now().Add(kernelTimeout)), c.SetReadBuffer(kernelBuffer), c.SetWriteBuffer(kernelBuffer))
	}))
	return c
}

// nft is the table in the kernel.
type nft struct{}

// replace puts the rules in the place of the former ones, in one transaction: the kernel takes all of them, or keeps
// the former. Their counters begin with what was counted.
func (nft) replace(rules []rule, counted hits) error {
	c := dial()
	t := c.AddTable(&table) // or else there may be none to delete
	c.DelTable(t)
	chains, named := map[string]*nftables.Chain{}, map[string]bool{"": true}
	if rules != nil {
		c.AddTable(t)
		for name, hook := range map[string]*nftables.ChainHook{input: nftables.ChainHookInput, forward: nftables.ChainHookForward} {
			chains[name] = c.AddChain(&nftables.Chain{Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: new(priority), Policy: new(nftables.ChainPolicyAccept)})
		}
	}
	for _, r := range rules {
		if !named[r.name] {
			named[r.name] = true
			c.AddObj(&nftables.CounterObj{Table: t, Name: r.name, Packets: counted[r.name].Packets, Bytes: counted[r.name].Bytes})
		}
		for _, exprs := range r.exprs() {
			c.AddRule(&nftables.Rule{Table: t, Chain: chains[r.chain], Exprs: exprs})
		}
	}
	return firstError(c.Flush())
}

// firstError is the first one of those of all messages of a transaction.
func firstError(err error) error {
	if err == nil {
		return nil
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return errors.New(first)
}

// read returns no counters if there is no table.
func (nft) read() (hits, error) {
	all, err := dial().GetObjects(&table)
	counted := hits{}
	for _, o := range all {
		if counter, ok := o.(*nftables.CounterObj); ok {
			counted[counter.Name] = *counter
		}
	}
	return counted, err
}

// exprs are the rules of nftables that have the meaning of this one, each with one entry of each list.
func (r rule) exprs() (all [][]expr.Any) {
	end := []expr.Any{&expr.Verdict{Kind: map[string]expr.VerdictKind{accept: expr.VerdictAccept, drop: expr.VerdictDrop}[r.action]}}
	if r.name != "" {
		end = append([]expr.Any{&expr.Objref{Type: int(nftables.ObjTypeCounter), Name: r.name}}, end...)
	}
	for _, family := range []byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		other := func(p netip.Prefix) bool { return p.Addr().Is4() != (family == unix.NFPROTO_IPV4) }
		from, to := slices.DeleteFunc(slices.Clone(r.from), other), slices.DeleteFunc(slices.Clone(r.to), other)
		if len(from) == 0 && len(r.from) > 0 || len(to) == 0 && len(r.to) > 0 {
			continue
		}
		for _, source := range each(from, func(p netip.Prefix) []expr.Any { return address(p, 0) }) {
			for _, destination := range each(to, func(p netip.Prefix) []expr.Any { return address(p, 1) }) {
				for _, port := range each(r.ports, destinationPort) {
					all = append(all, slices.Concat(r.base(family), source, destination, port, end))
				}
			}
		}
	}
	return all
}

// each are the conditions of a list, or none once.
func each[T any](entries []T, condition func(T) []expr.Any) [][]expr.Any {
	if len(entries) == 0 {
		return [][]expr.Any{nil}
	}
	return lists.Of(entries, condition)
}

// between compares what load loads.
func between(load expr.Any, first, last []byte) []expr.Any {
	return []expr.Any{load, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last}}
}

func metaIs(key expr.MetaKey, data ...byte) []expr.Any {
	return between(&expr.Meta{Key: key, Register: 1}, data, data)
}

func (r rule) base(family byte) []expr.Any {
	all := metaIs(expr.MetaKeyNFPROTO, family)
	if r.link != "" {
		all = append(all, metaIs(expr.MetaKeyIIFNAME, append([]byte(r.link), make([]byte, unix.IFNAMSIZ-len(r.link))...)...)...)
	}
	if r.goesOn {
		states := binary.NativeEndian.AppendUint32(nil, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED|expr.CtStateBitUNTRACKED)
		all = append(all, &expr.Ct{Key: expr.CtKeySTATE, Register: 1}, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: states, Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)})
	}
	number := map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "icmp": unix.IPPROTO_ICMP}[r.protocol]
	if number == unix.IPPROTO_ICMP && family == unix.NFPROTO_IPV6 {
		number = unix.IPPROTO_ICMPV6
	}
	if number != 0 {
		all = append(all, metaIs(expr.MetaKeyL4PROTO, number)...)
	}
	return all
}

// address compares the source of a packet (which is 0) or its destination (1).
func address(p netip.Prefix, which uint32) []expr.Any {
	first, last, _ := nftables.NetFirstAndLastIP(p.String()) // of any prefix
	at, length := uint32(12), uint32(len(first))             // RFC 791
	if p.Addr().Is6() {
		at = 8 // RFC 8200
	}
	return between(&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: at + which*length, Len: length, DestRegister: 1}, first, last)
}

func destinationPort(p ports) []expr.Any {
	number := func(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }
	return between(&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1}, number(p[0]), number(p[1]))
}
