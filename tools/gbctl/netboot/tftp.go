package netboot

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Packets of TFTP, and the codes of its errors (RFC 1350, 5 and appendix).
const (
	opRead  = 1
	opData  = 3
	opAck   = 4
	opError = 5
	opOACK  = 6 // RFC 2347

	notFound    = 1
	accessError = 2
	illegal     = 4
)

const (
	defaultBlock = 512 // RFC 1350
	// maxBlock and its headers are what an Ethernet frame holds: firmware often can't put fragments of IP together.
	maxBlock  = 1500 - 20 - 8 - 4
	maxWindow = 64 // blocks; more is no faster, and network cards of firmware lose frames
	// maxTransfers is more than a rack has machines. Further requests aren't answered, and are repeated.
	maxTransfers = 128
	// ackWait is for the answer to a window. It doubles with each of ackTries.
	ackWait  = time.Second
	ackTries = 6
	// ackMost is what one try waits at most, whatever the client asks for: who never answers mustn't take the place of
	// others for hours.
	ackMost = 10 * time.Second
)

// A readRequest is what a client asks for.
type readRequest struct {
	name          string
	block, window int
	wait          time.Duration
	accepted      []byte // the options for OACK; nil: none
}

// serveTFTP gives files to machines. Each transfer has a port of its own, and ends at the latest with ctx.
func (s *Server) serveTFTP(ctx context.Context) error {
	var transfers sync.WaitGroup
	defer transfers.Wait()
	packet := make([]byte, 64<<10)
	for {
		n, peer, err := s.tftp.ReadFrom(packet)
		if err != nil {
			return err
		}
		request := string(packet[:n])
		select {
		case s.transfers <- struct{}{}:
			transfers.Go(func() {
				defer func() { <-s.transfers }()
				s.transfer(ctx, peer, request)
			})
		default:
		}
	}
}

// transfer answers one request.
func (s *Server) transfer(ctx context.Context, peer net.Addr, packet string) {
	who := s.machines.name(peer.String())
	local := net.UDPAddr{IP: s.o.On.Address.AsSlice()}
	to, _ := peer.(*net.UDPAddr)
	c, err := net.DialUDP("udp4", &local, to)
	if err != nil {
		s.report.line(who, "TFTP: %v", err)
		return
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	r, code, err := s.parse(packet)
	if err != nil {
		s.report.line(who, "TFTP: %v", err)
		_, _ = c.Write(errorPacket(code, err.Error())) // who asks again gets it again
		return
	}
	file := s.files[r.name]
	p := s.report.progress(who, r.name, "TFTP", len(file))
	p.end(ended(ctx, send(c, r, file, p.reached)))
}

func errorPacket(code uint16, text string) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{0, opError}, code), text+"\x00"...)
}

// parse reads a request, and takes its options (RFC 2347 to 2349, RFC 7440). Without an error, the file exists.
func (s *Server) parse(packet string) (r readRequest, code uint16, err error) {
	fields := strings.Split(packet, "\x00")
	// opcode, with the name; mode; and what is behind the last NUL. The opcode has a NUL.
	if len(packet) < 2 || len(fields) < 4 {
		return r, illegal, errors.New("a packet that is no request")
	}
	name := fields[1]
	if packet[0] != 0 || packet[1] != opRead {
		return r, accessError, errors.New("a request that isn't for reading: files can only be read")
	}
	name = name[1:]
	r = readRequest{name: strings.TrimPrefix(strings.ReplaceAll(name, `\`, "/"), "/"), block: defaultBlock, window: 1, wait: ackWait}
	file, known := s.files[r.name]
	if !known {
		return r, notFound, fmt.Errorf("no file %q", name)
	}
	if !strings.EqualFold(fields[2], "octet") {
		return r, illegal, fmt.Errorf("%s: mode %q; it must be octet", r.name, fields[2])
	}
	accept := func(option string, value int) {
		r.accepted = append(r.accepted, option+"\x00"+strconv.Itoa(value)+"\x00"...)
	}
	for options := fields[3:]; len(options) >= 2; options = options[2:] {
		value, err := strconv.Atoi(options[1])
		if err != nil {
			continue // an option that isn't accepted isn't an error
		}
		switch option := strings.ToLower(options[0]); {
		case option == "blksize" && value >= 8:
			r.block = min(value, maxBlock)
			accept(option, r.block)
		case option == "windowsize" && value >= 1:
			r.window = min(value, maxWindow)
			accept(option, r.window)
		case option == "timeout" && value >= 1 && value <= 255:
			r.wait = time.Duration(value) * time.Second
			accept(option, value)
		case option == "tsize":
			accept(option, len(file))
		}
	}
	return r, 0, nil
}

// send sends a file. reached is called with the number of bytes that have arrived.
//
//	client                server
//	  │ RRQ, options ──────▶│
//	  │◀────────────── OACK │      without options: the first window at once
//	  │ ACK 0 ─────────────▶│
//	  │◀──────── DATA 1 … n │      a window
//	  │ ACK n ─────────────▶│      less than n: the next window begins behind it
func send(c net.Conn, r readRequest, file []byte, reached func(int64)) error {
	if r.accepted != nil {
		oack := append([]byte{0, opOACK}, r.accepted...)
		if _, err := exchange(c, r, -1, 1, func(int) []byte { return oack }); err != nil {
			return err
		}
	}
	blocks := len(file)/r.block + 1 // the last one is shorter, and can be empty
	data := make([]byte, 0, 4+maxBlock)
	for done := 0; done < blocks; {
		n, err := exchange(c, r, done, min(r.window, blocks-done), func(i int) []byte {
			at := i * r.block
			data = binary.BigEndian.AppendUint16(append(data[:0], 0, opData), uint16(i+1))
			return append(data, file[at:min(at+r.block, len(file))]...)
		})
		if err != nil {
			return err
		}
		done += n
		reached(int64(min(done*r.block, len(file))))
	}
	return nil
}

// exchange sends a window of count packets from the one with the number first on, and returns how many of them were
// acknowledged: at least one. Numbers begin with 0, those of TFTP with 1, so that -1 is OACK.
func exchange(c net.Conn, r readRequest, first, count int, packet func(int) []byte) (int, error) {
	answer := make([]byte, 1024)
	for try := range ackTries {
		for i := first; i < first+count; i++ {
			if _, err := c.Write(packet(i)); err != nil {
				return 0, err
			}
		}
		if err := c.SetReadDeadline(time.Now().Add(min(r.wait<<try, ackMost))); err != nil {
			return 0, err
		}
		for {
			n, err := c.Read(answer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return 0, err
			}
			if n < 4 {
				continue
			}
			switch binary.BigEndian.Uint16(answer) {
			case opError:
				text, _, _ := strings.Cut(string(answer[4:n]), "\x00")
				return 0, fmt.Errorf("the machine says: %q (TFTP error %d)", text, binary.BigEndian.Uint16(answer[2:]))
			case opAck:
				// The number has 16 bits. It is that of the last packet that has arrived.
				got := int(binary.BigEndian.Uint16(answer[2:]) - uint16(first))
				if got >= 1 && got <= count {
					return got, nil
				}
				// An old acknowledgement is no reason to send a window again: this would double all later ones (RFC
				// 1123, 4.2.3.1).
			}
		}
	}
	return 0, fmt.Errorf("no answer to %d tries", ackTries)
}
