package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"
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
