package netboot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// client is a TFTP client that can lose packets.
type client struct {
	conn          net.PacketConn
	block, window int
	lose          func(block int) bool // of the data that arrive, counted from 1
	options       string               // that the server has accepted
}

// read reads a file. An error of the server is "CODE TEXT".
func (c *client) read(server net.Addr, opcode byte, name, mode string, options ...string) ([]byte, error) {
	request := fmt.Sprintf("\x00%c%s\x00%s\x00", opcode, name, mode)
	for _, o := range options {
		request += o + "\x00"
	}
	if _, err := c.conn.WriteTo([]byte(request), server); err != nil {
		return nil, err
	}
	if c.block == 0 {
		c.block, c.window = defaultBlock, 1
	}
	var file []byte
	have, packet := 0, make([]byte, 64<<10)
	for {
		if err := c.conn.SetReadDeadline(time.Now().Add(eventually.Scale(budget))); err != nil {
			return nil, err
		}
		n, peer, err := c.conn.ReadFrom(packet)
		if err != nil {
			return nil, err
		}
		number := binary.BigEndian.Uint16(packet[2:])
		ack := func() error {
			_, err := c.conn.WriteTo(binary.BigEndian.AppendUint16([]byte{0, opAck}, uint16(have)), peer)
			return err
		}
		switch packet[1] {
		case opOACK:
			c.options = strings.ReplaceAll(string(packet[2:n]), "\x00", " ")
			err = ack()
		case opError:
			return nil, fmt.Errorf("%d %s", number, bytes.TrimRight(packet[4:n], "\x00"))
		case opData:
			switch {
			case c.lose != nil && c.lose(have+1):
			case number != uint16(have+1):
				err = ack() // RFC 7440: of the last block in order
			default:
				have++
				file = append(file, packet[4:n]...)
				last := n-4 < c.block
				if last || have%c.window == 0 {
					err = ack()
				}
				if last {
					return file, err
				}
			}
		}
		if err != nil {
			return nil, err
		}
	}
}

func newClient(t *testing.T) *client {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{conn: c}
}

func TestTFTP(t *testing.T) {
	s, out := serve(t, Options{On: loopback(t)}, ports{})
	read := func(c *client, name string, options ...string) {
		t.Helper()
		got, err := c.read(s.tftp.LocalAddr(), opRead, name, "octet", options...)
		if want := testFiles()[strings.TrimPrefix(name, "/")]; err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s %v: %d bytes, want %d: %v", name, options, len(got), len(want), err)
		}
	}
	read(newClient(t), media.IPXEFile)
	read(newClient(t), "/"+media.ScriptFile)
	read(newClient(t), "nothing")
	out.says(t, "127.0.0.1 loads undionly.kpxe by TFTP (4404 bytes)", "has loaded undionly.kpxe in ")

	c := newClient(t)
	c.block, c.window = maxBlock, 1
	read(c, media.IPXEFile, "tsize", "0", "blksize", "9000", "unknown", "7", "multicast", "")
	if c.options != "tsize 4404 blksize 1468 " {
		t.Errorf("options %q", c.options)
	}
	// The numbers of blocks have 16 bits.
	c = newClient(t)
	c.block, c.window = 8, maxWindow
	read(c, media.UKIFile, "BLKSIZE", "8", "windowsize", "100")
	if c.options != "blksize 8 windowsize 64 " {
		t.Errorf("options %q", c.options)
	}
	// Packets are lost: the first one of a window, and others.
	lost := map[int]bool{}
	c = newClient(t)
	c.block, c.window = 512, 4
	c.lose = func(block int) bool {
		first := !lost[block] && (block == 1 || block == 6 || block == 16)
		lost[block] = true
		return first
	}
	read(c, media.UKIFile, "blksize", "512", "windowsize", "4")
}

func TestTFTPRefuses(t *testing.T) {
	s, out := serve(t, Options{On: loopback(t)}, ports{})
	for _, c := range []struct {
		opcode           byte
		name, mode, want string
	}{
		{opRead, "../netboot.go", "octet", `1 no file "../netboot.go"`},
		{opRead, `..\netboot.go`, "octet", "1 no file"},
		{opRead, "/etc/passwd", "octet", `1 no file "/etc/passwd"`},
		{opRead, "", "octet", "1 no file"},
		{opRead, media.ScriptFile, "netascii", "4 boot.ipxe: mode"},
		{2, media.ScriptFile, "octet", "2 a request that isn't for reading"},
	} {
		if _, err := newClient(t).read(s.tftp.LocalAddr(), c.opcode, c.name, c.mode); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%d %q %s: %v, want %s", c.opcode, c.name, c.mode, err, c.want)
		}
	}
	if _, code, err := s.parse("\x00\x01"); err == nil || code != illegal {
		t.Errorf("a short packet: %d %v", code, err)
	}
	out.says(t, `127.0.0.1 TFTP: no file "/etc/passwd"`)
}

// A client that says that it wanted only the size isn't reported. One that goes away is, as soon as its port is closed.
func TestTFTPClientGoesAway(t *testing.T) {
	s, out := serve(t, Options{On: loopback(t)}, ports{})
	c := newClient(t)
	c.lose = func(block int) bool {
		if block == 3 {
			c.conn.Close()
		}
		return false
	}
	if _, err := c.read(s.tftp.LocalAddr(), opRead, media.UKIFile, "octet"); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the client ended with %v", err)
	}
	out.says(t, "stopped loading garboard.efi at 1024 bytes of 0.5 MB: ")
	if text := out.String(); strings.Contains(text, "has loaded") {
		t.Errorf("report:\n%s", text)
	}
}
