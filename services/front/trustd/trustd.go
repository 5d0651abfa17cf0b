// Package trustd signs certificates for the nodes that can't make their own, and
// PID 1's side of that.
//
// Workers don't hold the key of the machine API's authority. They request certificates
// from a control plane: the first one with the token in their configuration, and others with
// a proof of the one that they have. The server is a process
// of its own, in a sandbox (Main), which bounds who asks, and how often. It has no key but that of
// its own certificate, which PID 1 writes (Service). PID 1 has the authority and the policy, and
// signs (signer).
//
//	worker ──TLS 1.3, token or proof, CSR──▶ trustd ──socket──▶ PID 1 ──▶ certificate
//	                                          ▲                  │ the tokens in etcd, the policy,
//	                                          │                  ▼ and the names of nodes (roster)
//	                                          └── state.json ◀── Service
//
// The policy (policy.go) decides what is in a certificate, never the request: a client
// with the token gets a certificate for a server, without a role, for the address that
// it connects from. So a stolen token gives no certificate of an administrator, of the
// cluster's endpoint, or of an address that the thief doesn't have, nor one with the name of
// a control plane or of another node (services/kubernetes/roster).
package trustd

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// ID of the service, and the argument with which PID 1's program becomes it.
	ID = "trustd"
	// UID is its user and group.
	UID = 51
)

// goMemory is from where on Go collects more often, in bytes: nothing of a call
// stays.
const goMemory = 16 << 20

// Main is trustd's process. It returns the exit status.
func Main() int {
	return runAt(boot.TrustDir, sandbox.SocketPath, net.JoinHostPort("", strconv.Itoa(api.TrustPort)))
}

func runAt(dir, socket, address string) int {
	return tlsserver.Process(goMemory, func(ctx context.Context, log *slog.Logger) error {
		s, err := newServer(dir, socket, log)
		if err != nil {
			return err
		}
		return s.listener().Listen(ctx, address)
	})
}

var (
	errNoPeer = errors.New("the caller's address is unknown")
	errToken  = errors.New("the token is neither machine.token of this control plane nor one of gbctl token create that still counts, and the certificate to which the name belongs doesn't prove the request")
)
