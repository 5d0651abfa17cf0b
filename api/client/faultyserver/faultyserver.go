// Package faultyserver is a server for tests that behaves like a node that shuts down: it
// accepts connections and closes them without an answer.
package faultyserver

import "net"

// Listen accepts connections at a loopback address until stop is called. It resets every
// second connection and closes the others normally.
func Listen() (address string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if i%2 == 0 {
				_ = conn.(*net.TCPConn).SetLinger(0) // the close sends a reset, tcp(7)
			}
			_ = conn.Close()
		}
	}()
	return l.Addr().String(), func() { _ = l.Close(); <-done }, nil
}
