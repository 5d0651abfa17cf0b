// Package qmp speaks the QEMU Machine Protocol: one line of JSON per message over
// a UNIX socket, answers in the order of commands, events in between.
//
//	QEMU                          we
//	{"QMP": {"version": …}}  →
//	                         ←   {"execute": "qmp_capabilities"}
//	{"return": {}}           →
//	                         ←   {"execute": "system_powerdown"}
//	{"return": {}}           →
//	{"event": "POWERDOWN"…}  →
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"sync"
)

// Client is one connection.
type Client struct {
	conn    net.Conn
	answers chan message
	done    chan struct{} // closed when the connection has ended

	mu sync.Mutex // held across a command and its answer
}

type message struct {
	QMP    json.RawMessage `json:"QMP"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"` // it is no answer
	Data  struct {
		Reason string `json:"reason"` // of SHUTDOWN and RESET: guest-shutdown, guest-reset, host-qmp-quit, …
	} `json:"data"`
}

// New takes over a new connection. onEvent is called for each event, in order, and must not
// call the client.
func New(ctx context.Context, conn net.Conn, onEvent func(name, reason string)) (*Client, error) {
	c := &Client{conn: conn, answers: make(chan message, 1), done: make(chan struct{})}
	go c.read(onEvent)
	if err := c.Do(ctx, "qmp_capabilities"); err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) read(onEvent func(name, reason string)) {
	defer close(c.done)
	in := json.NewDecoder(bufio.NewReader(c.conn))
	for {
		var m message
		if in.Decode(&m) != nil {
			return
		}
		switch {
		case m.Event != "":
			onEvent(m.Event, m.Data.Reason)
		case m.QMP == nil:
			select {
			case c.answers <- m:
			default: // its command was given up
			}
		}
	}
}

// Do runs one command without arguments.
func (c *Client) Do(ctx context.Context, command string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	select { // the answer to a command that was given up
	case <-c.answers:
	default:
	}
	if err := json.NewEncoder(c.conn).Encode(map[string]string{"execute": command}); err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	var m message
	select {
	case m = <-c.answers:
	case <-c.done:
		select { // the answer may have been the last message
		case m = <-c.answers:
		default:
			return fmt.Errorf("qmp %s: %w", command, net.ErrClosed)
		}
	case <-ctx.Done():
		return fmt.Errorf("qmp %s: %w", command, ctx.Err())
	}
	if m.Error != nil {
		return fmt.Errorf("qmp %s: %s: %s", command, m.Error.Class, m.Error.Desc)
	}
	return nil
}

// Done is closed when the connection has ended and onEvent was called for every event.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the connection.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	return err
}
