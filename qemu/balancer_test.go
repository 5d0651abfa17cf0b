package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu/network"
)

// echoes is a dialer whose nodes answer with their name and the size of the request, once
// they have received all of it; those whose name starts with "dead" don't exist.
type echoes struct{}

func (echoes) Dial(_ context.Context, n network.Node, port int) (net.Conn, error) {
	if strings.HasPrefix(n.Name, "dead") {
		return nil, errors.New("no such host")
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go echo(l, fmt.Sprintf("%s:%d", n.Name, port))
	return net.Dial("tcp4", l.Addr().String())
}

func echo(l net.Listener, name string) {
	conn, err := l.Accept()
	l.Close() // not before: data that wasn't read yet would be lost by a reset
	if err != nil {
		return
	}
	defer conn.Close()
	request, _ := io.ReadAll(conn) // to the half-close
	fmt.Fprintf(conn, "%s received %d", name, len(request))
}

func TestForward(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	for _, tc := range []struct{ nodes, want string }{
		{"alive", "alive:6443 received 100000"},
		{"dead-1 dead-2 alive", "alive:6443 received 100000"},
		{"dead", ""}, // closed, not hanging
	} {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var nodes []network.Node
		for _, name := range strings.Fields(tc.nodes) {
			nodes = append(nodes, network.Node{Name: name})
		}
		b := newBalancer(echoes{}, nodes, 6443, nil, quiet)
		b.Serve(l)
		conn, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(make([]byte, 100000)) // fails where no node exists
		_ = conn.(*net.TCPConn).CloseWrite()
		got, _ := io.ReadAll(conn)
		if string(got) != tc.want {
			t.Errorf("%s: got %q, want %q", tc.nodes, got, tc.want)
		}
		conn.Close()
		b.Close()
	}
}
