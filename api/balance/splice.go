package balance

import (
	"io"
	"net"
	"sync"
)

type halfCloser interface{ CloseWrite() error }

// splice copies both ways until both sides are done, passing on half-closes.
func splice(a, b net.Conn) {
	defer b.Close()
	var both sync.WaitGroup
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if h, ok := to.(halfCloser); ok && err == nil {
			_ = h.CloseWrite()
			return
		}
		to.Close() // broken: the other direction mustn't wait
		from.Close()
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
}
