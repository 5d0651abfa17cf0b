package configuration

import (
	"errors"
	"fmt"
	"strings"
)

// What a caller may want to decide on.
var (
	ErrNoConfig         = errors.New("the node has no configuration")
	ErrConfigured       = errors.New("the node has a configuration")
	ErrUnsigned         = errors.New("machine.install.unsigned: true would install a system although nobody vouches for it: gbctl apply-config --insecure --unsigned says that you want this")
	ErrStale            = errors.New("the node's configuration has changed since it was read")
	ErrBusy             = errors.New("not now")
	ErrNoVersion        = errors.New("isn't in the history; see gbctl config history")
	ErrNotKept          = errors.New("isn't kept: it, or one after it, has persist: false")
	ErrNothingToConfirm = errors.New("nothing is being tried")
	ErrNoWay            = errors.New("no link of the node with a carrier would get an address, or the last default route would go: it couldn't be reached any more. Use mode try, which undoes the change unless it is confirmed, mode reboot or on-reboot, or --force")
)

// NeedsReboot refuses to apply without a reboot what takes one.
type NeedsReboot struct{ Paths []string }

func (e *NeedsReboot) Error() string {
	return fmt.Sprintf("takes a reboot, which this mode rules out: %s; use mode auto, reboot or on-reboot", strings.Join(e.Paths, ", "))
}
