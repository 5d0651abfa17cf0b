// Package trustd signs certificates for the nodes that can't make their own, and
// PID 1's side of that.
//
// Workers don't hold the key of the machine API's authority. They ask a control
// plane, with the token that their configuration holds. What answers is a process of
// its own, in a sandbox (Main), which knows what PID 1 tells it (Service): the
// authority, the hash of the token, and which names are taken.
//
//	worker ──TLS 1.3, token, CSR──▶ trustd ──▶ certificate
//	                                 ▲ authority, hash of the token, names
//	                                 └── /run/garboard/trustd ◀── Service, in PID 1
//
// What a certificate says is the policy's to decide (policy.go), and never the
// request's: who holds the token gets a certificate for a server, without a role,
// for the address that it asks from. So a stolen token doesn't make an
// administrator, nor the cluster's endpoint, nor an address that its thief hasn't.
// It does make any other name: which are nodes', and whose, nobody here knows.
package trustd

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/front/connlimit"
)

const (
	// ID of the service.
	ID = "trustd"
	// Command is the argument with which PID 1's program becomes trustd.
	Command = "trustd"
	// UID is its user and group.
	UID = 51
)

// goMemory is from where on Go collects more often, in bytes: nothing of a call
// stays.
const goMemory = 16 << 20

// Main is trustd's process. It returns the exit status.
func Main() int {
	return runAt(boot.TrustDir, net.JoinHostPort("", strconv.Itoa(api.TrustPort)))
}

func runAt(dir, address string) int {
	return connlimit.Process(goMemory, func(ctx context.Context, log *slog.Logger) error {
		s, err := newServer(dir, log)
		if err != nil {
			return err
		}
		return s.listener().Listen(ctx, address)
	})
}

var (
	errNoPeer = errors.New("the caller's address can't be told")
	errNoKey  = errors.New("its key isn't there")
)
