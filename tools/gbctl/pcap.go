package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/bpf"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// Of the format of pcap (draft-ietf-opsawg-pcap).
const (
	pcapMagic    = 0xa1b2c3d4 // times in microseconds
	pcapEthernet = 1          // LINKTYPE_ETHERNET
)

func (a *app) pcapCommand() *cobra.Command {
	r := &apiv1.CaptureRequest{}
	var file, host string
	var port uint16
	var duration time.Duration
	cmd := command("pcap -i LINK -O FILE", func(cmd *cobra.Command, _ []string) (err error) {
		var only netip.Addr
		if host != "" {
			if only, err = netip.ParseAddr(host); err != nil || only.Zone() != "" {
				return usagef("--host %q: must be an address without a zone", host)
			}
		}
		except := uint16(api.Port) // each packet of the answer would be captured, and sent
		if port == except {
			except = 0
		}
		if r.Filter, err = packetFilter(only.Unmap(), port, except); err != nil {
			return err
		}
		r.Duration = durationpb.New(duration)
		return a.untimed(cmd.Context(), "pcap", func(ctx context.Context, c *client.Client) error { return a.capture(ctx, c, r, file) })
	})
	cmd.Flags().StringVarP(&r.Link, "interface", "i", "", "the link whose packets are captured")
	cmd.Flags().StringVarP(&file, outputFile, "O", "", "file to write, in the format of pcap")
	renamed(cmd, "output", "o", outputFile)
	cmd.Flags().DurationVar(&duration, "duration", 30*time.Second, "end after this time, 5m at most")
	cmd.Flags().Uint64Var(&r.Bytes, "bytes", 64<<20, "end before the packets have more bytes than this, 64 MiB at most")
	cmd.Flags().Uint64Var(&r.Packets, "packets", 0, "end after this many packets (0: any number)")
	cmd.Flags().StringVar(&host, "host", "", "only packets from or to this address")
	cmd.Flags().Uint16Var(&port, "port", 0, "only packets of TCP and UDP from or to this port (0: all but those of the machine API)")
	must(cmd.MarkFlagRequired("interface"))
	must(cmd.MarkFlagRequired(outputFile))
	return cmd
}

// capture writes what has come, also when it is interrupted: what others see on the network is for the user alone.
func (a *app) capture(ctx context.Context, c *client.Client, r *apiv1.CaptureRequest, file string) (err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	order := binary.LittleEndian
	head := order.AppendUint32(nil, pcapMagic)
	head = order.AppendUint16(order.AppendUint16(head, 2), 4) // the format's version
	head = order.AppendUint64(head, 0)
	if _, err := f.Write(order.AppendUint32(order.AppendUint32(head, longestPacket), pcapEthernet)); err != nil {
		return err
	}
	packets, lost := 0, uint64(0)
	err = client.Receive(ctx, c.Node.Capture, r, func(m *apiv1.CapturedPacket) error {
		if lost += m.Lost; m.Time == nil {
			return nil
		}
		packets++
		var record []byte
		for _, v := range []int64{m.Time.Seconds, int64(m.Time.Nanos / 1000), int64(len(m.Data)), int64(len(m.Data))} {
			record = order.AppendUint32(record, uint32(v))
		}
		_, err := f.Write(append(record, m.Data...))
		return err
	})
	if err != nil && packets == 0 {
		return errors.Join(err, os.Remove(file))
	}
	fmt.Fprintf(a.notes(), "%s: %d packets in %s\n", c.Name, packets, file)
	if lost > 0 {
		fmt.Fprintf(a.err, "%s: %d packets were lost: they came faster than they could be sent\n", c.Name, lost)
	}
	return err
}

// Numbers in packets: of IEEE 802.3, RFC 791, RFC 8200 and RFC 9293, as are the places below.
const (
	typeIPv4, typeIPv6     = 0x0800, 0x86dd
	protocolTCP            = 6
	protocolUDP            = 17
	ethernetHead, ipv6Head = 14, 40
	fragmentBits           = 0x1fff // the offset in a fragment of IPv4: only the first one has ports
	longestPacket          = 256 << 10
)

// packetFilter is a program for the kernel of a node. It passes Ethernet packets of the host and the port, and none of
// the port except. What isn't given is any.
func packetFilter(host netip.Addr, port, except uint16) ([]uint64, error) {
	var drop, pass []bpf.Instruction
	selects := host.IsValid() || port != 0
	for _, protocol := range []uint32{protocolTCP, protocolUDP} {
		for side := range uint32(4) { // source or destination has the host, and the port
			for _, six := range []bool{false, true} {
				if except != 0 {
					drop = append(drop, packetRule(six, netip.Addr{}, except, protocol, side, 0)...)
				}
				if selects && (!host.IsValid() || host.Is6() == six) {
					pass = append(pass, packetRule(six, host, port, protocol, side, longestPacket)...)
				}
			}
		}
	}
	result := bpf.RetConstant{}
	if !selects {
		result.Val = longestPacket
	}
	program, err := bpf.Assemble(slices.Concat(drop, pass, []bpf.Instruction{result}))
	out := make([]uint64, len(program))
	for i, p := range program {
		out[i] = uint64(p.Op)<<48 | uint64(p.Jt)<<40 | uint64(p.Jf)<<32 | uint64(p.K)
	}
	return out, err
}

// packetRule ends with a result for packets of one version of IP from or to a host and a port.
func packetRule(six bool, host netip.Addr, port uint16, protocol, side, result uint32) []bpf.Instruction {
	kind, next, source, size := uint32(typeIPv4), uint32(ethernetHead+9), uint32(ethernetHead+12), uint32(4)
	if six {
		kind, next, source, size = typeIPv6, ethernetHead+6, ethernetHead+8, 16
	}
	b := []bpf.Instruction{bpf.RetConstant{Val: result}}
	// From the last test to the first: one that fails skips all that is there.
	test := func(want uint32, load ...bpf.Instruction) {
		b = slices.Concat(load, []bpf.Instruction{bpf.JumpIf{Val: want, SkipFalse: uint8(len(b))}}, b)
	}
	if port != 0 {
		at := ethernetHead + side/2*2
		if six {
			test(uint32(port), bpf.LoadAbsolute{Off: at + ipv6Head, Size: 2})
		} else {
			test(uint32(port), bpf.LoadMemShift{Off: ethernetHead}, bpf.LoadIndirect{Off: at, Size: 2})
			test(0, bpf.LoadAbsolute{Off: ethernetHead + 6, Size: 2}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: fragmentBits})
		}
		test(protocol, bpf.LoadAbsolute{Off: next, Size: 1})
	}
	address := host.AsSlice()
	for i := 0; i < len(address); i += 4 {
		test(binary.BigEndian.Uint32(address[i:]), bpf.LoadAbsolute{Off: source + side%2*size + uint32(i), Size: 4})
	}
	test(kind, bpf.LoadAbsolute{Off: 12, Size: 2})
	return b
}

func (a *app) netcheckCommand() *cobra.Command {
	cmd := command("netcheck HOST[:PORT]", func(cmd *cobra.Command, args []string) error {
		r, err := checkedHost(args[0])
		if err != nil {
			return err
		}
		p := a.printer()
		return a.sequential(cmd.Context(), func(ctx context.Context, c *client.Client) error {
			end := ""
			err := client.Receive(ctx, c.Node.CheckNetwork, r, func(s *apiv1.NetworkStep) error {
				if s.Error != "" {
					end = fmt.Sprintf("the way to %s ends at %s: %s", args[0], s.Layer, s.Error)
				}
				if a.output == "json" {
					return writeLine(a, document(c.Name, s))
				}
				return p.lines(c.Name, []string{stepLine(s)})
			})
			if err == nil && end != "" {
				err = errors.New(end)
			}
			return err
		})
	})
	return a.linesFlag(cmd)
}

// checkedHost is HOST, HOST:PORT, ADDRESS or [ADDRESS]:PORT.
func checkedHost(text string) (*apiv1.CheckNetworkRequest, error) {
	if bare := strings.Trim(text, "[]"); net.ParseIP(bare) != nil || !strings.Contains(text, ":") {
		return &apiv1.CheckNetworkRequest{Host: bare}, nil
	}
	host, port, err := net.SplitHostPort(text)
	n, errPort := strconv.ParseUint(port, 10, 16)
	if err != nil || errPort != nil || n == 0 {
		return nil, usagef("%q: must be HOST, HOST:PORT or [ADDRESS]:PORT", text)
	}
	return &apiv1.CheckNetworkRequest{Host: host, Port: uint32(n)}, nil
}

func stepLine(s *apiv1.NetworkStep) string {
	state, text := "ok", s.Result
	if s.Error != "" {
		state, text = "ENDS", strings.TrimPrefix(s.Result+": "+s.Error, ": ")
	}
	return oneLine(fmt.Sprintf("%-9s %-4s %5d ms  %s", s.Layer, state, s.Took.AsDuration().Milliseconds(), text))
}
