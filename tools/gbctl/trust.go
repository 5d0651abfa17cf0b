package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// trusted returns a client for a node to which secrets, what, are about to be sent. Without
// --fingerprint, a machine in maintenance mode first shows its certificate. All later
// connections must present the same one.
func (a *app) trusted(ctx context.Context, c *client.Client, what string) (*client.Client, error) {
	if !a.insecure || a.fingerprint != "" {
		return c, nil
	}
	if _, err := client.Unary(ctx, c.Node.Version, &apiv1.VersionRequest{}); err != nil {
		return nil, err
	}
	shown := c.Shown()
	a.warn(c.Name, shown)
	if interactive(a.in) { // scripts aren't asked
		if err := a.ask(ctx, "send "+what+" to this machine?"); err != nil {
			return nil, err
		}
	}
	who, err := a.access()
	if err != nil {
		return nil, err
	}
	trusted, err := client.DialMaintenance(who, c.Name, shown)
	return a.observed(trusted), err
}

// warn prints, once for each node, that the certificate of the node was not verified.
func (a *app) warn(node, shown string) {
	if _, twice := a.warned.LoadOrStore(node, true); twice {
		return
	}
	fmt.Fprintf(a.err, "%s %s presents the certificate %s, which isn't verified; compare it with the one on the node's console, or give that one with --fingerprint\n", painted(a.err, "warning:"), node, shown)
}

var errDeclined = errors.New("nothing was done: the answer isn't yes")

// ask asks a question on the terminal. Any answer but yes aborts.
func (a *app) ask(ctx context.Context, what string) error {
	answer, err := a.typed(ctx, what+" [yes/no]: ")
	if err == nil && answer != "yes" {
		err = errDeclined
	}
	return err
}

// typed is the line that the user types after a prompt.
func (a *app) typed(ctx context.Context, prompt string) (string, error) {
	_, lines := a.userInput()
	fmt.Fprint(a.err, prompt)
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case line := <-lines:
		return strings.TrimSpace(line), nil
	}
}
