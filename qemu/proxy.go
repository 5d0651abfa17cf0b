package qemu

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// dialBudget bounds one try to reach a node, which is one hop away: a node that
// doesn't answer within it is off or frozen.
const dialBudget = 5 * time.Second

// A reacher connects to a TCP port of a node.
type reacher interface {
	Reach(ctx context.Context, n Node, port int) (net.Conn, error)
}

type halfCloser interface{ CloseWrite() error }

// Dial connects standard input and output to a TCP address: QEMU starts it for
// each connection that a guest makes to the registry, as QEMU itself has no way
// that also works in an isolated network.
func Dial(ctx context.Context, address string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, os.Stdin)
		if h, ok := conn.(halfCloser); ok {
			_ = h.CloseWrite()
		}
		sent <- err
	}()
	// QEMU gives one socket as both; the end of the answer is the end.
	if _, err := io.Copy(os.Stdout, conn); err != nil {
		return fmt.Errorf("dial %s: %w", address, err)
	}
	return nil
}
