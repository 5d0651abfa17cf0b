package neighbor

import (
	"encoding/hex"
	"net"
	"net/netip"
	"testing"

	"github.com/mdlayher/ndp"
	"pgregory.net/rapid"
)

var (
	ownMAC  = net.HardwareAddr{2, 0, 0, 0, 0, 5}
	peerMAC = net.HardwareAddr{2, 0, 0, 0, 0, 6}
	shared4 = netip.MustParseAddr("10.5.0.254")
	shared6 = netip.MustParseAddr("fd00::5:fe")
)

// The frames byte by byte, as in RFC 826, RFC 5227 and RFC 4861.
func TestFrames(t *testing.T) {
	t.Parallel()
	padding := hex.EncodeToString(make([]byte, 18))
	for name, f := range map[string]struct {
		frame []byte
		want  string
	}{
		"ARP probe": {ProbeFrame(ownMAC, nil, shared4), "ffffffffffff" + "020000000005" + "0806" +
			"0001" + "0800" + "0604" + "0001" + "020000000005" + "00000000" + "000000000000" + "0a0500fe" + padding},
		"ARP announcement": {Announcements(ownMAC, shared4)[0], "ffffffffffff" + "020000000005" + "0806" +
			"0001" + "0800" + "0604" + "0001" + "020000000005" + "0a0500fe" + "000000000000" + "0a0500fe" + padding},
		"ARP announcement as a reply": {Announcements(ownMAC, shared4)[1], "ffffffffffff" + "020000000005" + "0806" +
			"0001" + "0800" + "0604" + "0002" + "020000000005" + "0a0500fe" + "020000000005" + "0a0500fe" + padding},
		"neighbour solicitation": {ProbeFrame(ownMAC, nil, shared6), "3333ff0500fe" + "020000000005" + "86dd" +
			"60000000" + "0018" + "3aff" + "00000000000000000000000000000000" + "ff0200000000000000000001ff0500fe" +
			"8700" + "7ba1" + "00000000" + "fd0000000000000000000000000500fe"},
		"neighbour advertisement": {Announcements(ownMAC, shared6)[0], "333300000001" + "020000000005" + "86dd" +
			"60000000" + "0028" + "3aff" + "fd0000000000000000000000000500fe" + "ff020000000000000000000000000001" +
			"8800" + "4885" + "20000000" + "fd0000000000000000000000000500fe" + "0201020000000005" + "0e01020000000005"},
	} {
		if got := hex.EncodeToString(f.frame); got != f.want {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got, f.want)
		}
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	other4, other6 := netip.MustParseAddr("10.5.0.9"), netip.MustParseAddr("fd00::9")
	reply := arp(peerMAC, ownMAC, arpReply, shared4, ownMAC, other4)
	advertised := func(options ...ndp.Option) []byte {
		return icmp6(peerMAC, shared6, allNodes, &ndp.NeighborAdvertisement{Override: true, TargetAddress: shared6, Options: options})
	}
	kernel := advertised(&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: peerMAC})
	empty := advertised(&ndp.RawOption{Type: 200, Length: 1, Value: make([]byte, 6)})
	clear(empty[len(empty)-8:])
	for name, c := range map[string]struct {
		frame []byte
		of    netip.Addr
		want  Observation
	}{
		"a question":                  {ProbeFrame(peerMAC, nil, shared4), shared4, Probe},
		"a question to one alone":     {ProbeFrame(peerMAC, ownMAC, shared4), shared4, DirectProbe},
		"IPv6: question to one alone": {ProbeFrame(peerMAC, ownMAC, shared6), shared6, DirectProbe},
		"an answer to that":           {KeepaliveFrame(peerMAC, ownMAC, shared4), shared4, Keepalive},
		"IPv6: an answer to that":     {KeepaliveFrame(peerMAC, ownMAC, shared6), shared6, Keepalive},
		"a question for another":      {ProbeFrame(peerMAC, nil, other4), shared4, Nothing},
		"an announcement":             {Announcements(peerMAC, shared4)[0], shared4, Announcement},
		"another's announcement":      {Announcements(peerMAC, other4)[0], shared4, Nothing},
		"an answer":                   {reply, shared4, Reply},
		"IPv6: a question":            {ProbeFrame(peerMAC, nil, shared6), shared6, Probe},
		"IPv6: question, another":     {ProbeFrame(peerMAC, nil, other6), shared6, Nothing},
		"IPv6: an announcement":       {Announcements(peerMAC, shared6)[0], shared6, Announcement},
		"IPv6: a kernel's answer":     {kernel, shared6, Reply},
		"IPv6: another's":             {Announcements(peerMAC, other6)[0], shared6, Nothing},
		"IPv4, where IPv6 is shared":  {reply, shared6, Nothing},
		"IPv6, where IPv4 is shared":  {kernel, shared4, Nothing},
		"IPv6: without what it is of": {advertised(), shared6, Nothing},
		"IPv6: an option of no size":  {empty, shared6, Nothing},
	} {
		got, mac := read(c.frame, c.of)
		if got != c.want {
			t.Errorf("%s: got %d, want %d", name, got, c.want)
		}
		if got != Probe && got != Nothing && mac.String() != peerMAC.String() {
			t.Errorf("%s: it is from %s", name, mac)
		}
		for n := range c.frame { // cut off anywhere
			read(c.frame[:n], c.of)
		}
	}
}

// Frames may come from any machine.
func TestReadAnything(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		for _, address := range []netip.Addr{shared4, shared6} {
			valid := append(Announcements(peerMAC, address), ProbeFrame(peerMAC, nil, address), ProbeFrame(peerMAC, ownMAC, address), KeepaliveFrame(peerMAC, ownMAC, address))
			frame := rapid.SampledFrom(valid).Draw(t, "frame")
			for range rapid.IntRange(0, 4).Draw(t, "changes") {
				frame[rapid.IntRange(0, len(frame)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
			}
			read(frame[:rapid.IntRange(0, len(frame)).Draw(t, "length")], address)
		}
	})
}
