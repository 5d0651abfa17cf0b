// Package hangup is a node that goes down, for tests: it takes connections, and says
// nothing on any.
package hangup

import "net"

// Listen takes connections at an address of the loopback until stop. In turn it resets
// them and closes them in order.
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
				_ = conn.(*net.TCPConn).SetLinger(0) // resets it, tcp(7)
			}
			_ = conn.Close()
		}
	}()
	return l.Addr().String(), func() { _ = l.Close(); <-done }, nil
}
