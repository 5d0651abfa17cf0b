// Package timeserver is a time server for tests, which may lie.
package timeserver

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
)

const (
	header  = 48 // bytes of a message without extensions
	largest = 512
	// sinceNTP is the time from 1900, the beginning of NTP's time, to that of Unix (RFC 5905 §6).
	sinceNTP = 2_208_988_800
)

// Serve answers at an address until the test ends, with a time that is off. It returns the
// address with its port.
func Serve(t testing.TB, address string, off time.Duration) (string, error) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address)))
	if err != nil {
		return "", err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(conn, off)
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return conn.LocalAddr().String(), nil
}

func serve(conn *net.UDPConn, off time.Duration) {
	buf := make([]byte, largest)
	for {
		size, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		if size < header {
			continue
		}
		now, out := stamp(time.Now().Add(off)), make([]byte, header)
		out[0], out[1], out[3] = 4<<3|4, 2, 0xec // version 4, of a server; stratum; precision of 2^-20 s
		binary.BigEndian.PutUint64(out[16:], now)
		copy(out[24:], buf[40:header]) // the client's time, as it came
		binary.BigEndian.PutUint64(out[32:], now)
		binary.BigEndian.PutUint64(out[40:], now)
		_, _ = conn.WriteToUDPAddrPort(out, from)
	}
}

// stamp has 32 bits of seconds, and 32 of their fraction.
func stamp(at time.Time) uint64 {
	return uint64(at.Unix()+sinceNTP)<<32 | uint64(at.Nanosecond())<<32/uint64(time.Second)
}
