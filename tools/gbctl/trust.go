package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"golang.org/x/term"
)

// trusted is the client for a node that is about to be sent secrets. A machine in
// maintenance mode whose fingerprint nobody has named says who it is first, and
// from then on has to be that one.
func (a *app) trusted(ctx context.Context, c *client.Client) (*client.Client, error) {
	if !a.insecure || a.fingerprint != "" {
		return c, nil
	}
	if _, err := c.Node.Version(ctx, connect.NewRequest(&garboardv1.VersionRequest{})); err != nil {
		return nil, err
	}
	shown := c.Shown()
	a.warn(c.Name, shown)
	if err := a.ask("send it a configuration, with the keys of the cluster"); err != nil {
		return nil, err
	}
	who, err := a.access()
	if err != nil {
		return nil, err
	}
	return client.DialMaintenanceAs(who, c.Name, shown)
}

// warn tells, once for each node, whom one talks to without having asked for it.
func (a *app) warn(node, shown string) {
	if _, twice := a.warned.LoadOrStore(node, true); twice {
		return
	}
	fmt.Fprintf(a.err, "warning: %s shows the certificate %s, and is believed; compare it with the one on the node's console (--fingerprint does)\n", node, shown)
}

var errNotAgreed = errors.New("nothing was done, as that wasn't agreed to")

// ask waits for a yes where a person sits before a terminal; anything else aborts
// (S-012). A script has nobody to ask.
func (a *app) ask(what string) error {
	in, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return nil
	}
	fmt.Fprintf(a.err, "%s [yes/no]: ", what)
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != "yes" {
		return errNotAgreed
	}
	return nil
}
