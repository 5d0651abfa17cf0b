package trustd

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/front/tlsserver"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// peerHeader has the address of the node that asks trustd.
	peerHeader = "Garboard-Peer"
)

// signer is PID 1's side of a signature: it has the key, and the policy.
// trustd, which faces the network, isn't trusted.
type signer struct {
	o   Options
	log *slog.Logger
}

// Sign implements garboardv1connect.TrustServiceHandler.
func (s signer) Sign(ctx context.Context, r *connect.Request[apiv1.SignRequest]) (*connect.Response[apiv1.SignResponse], error) {
	peer, err := netip.ParseAddr(r.Header().Get(peerHeader))
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, errNoPeer)
	}
	cfg, err := configuration.Config(s.o.Store)
	now, none := s.o.current()
	own, bad := pki.ParseCert(now.Cert)
	if err = cmp.Or(err, none, bad); err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, err)
	}
	facts, err := s.o.Roster(ctx)
	if err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("this control plane doesn't know the cluster's nodes now: %w", err))
	}
	public, leaf, refused := newPolicy(own, cfg.Cluster.Network).check(r.Msg.GetRequest(), peer)
	// A certificate counts without the token as long as its key has the name: not after the Node was deleted.
	had, known := facts.Record(leaf.CN)
	by := renewedBy(r.Msg, cfg.Machine.TrustedCAs(), leaf.CN, facts.Now)
	renews := by != "" && known && had.Key == by
	if !renews && !facts.Admits(r.Msg.GetToken(), string(cfg.Machine.Token)) {
		return nil, connect.NewError(connect.CodeUnauthenticated, errToken) // of the request, nothing is told
	}
	if refused != nil {
		return nil, connect.NewError(connect.CodePermissionDenied, refused)
	}
	key, err := pki.KeyID(public)
	if err != nil {
		return nil, connect.NewError(connect.CodePermissionDenied, err)
	}
	cert, err := pki.CheckProof(r.Msg.GetProof(), cfg.Cluster.TrustedCAs(), secrets.SignPurpose, r.Msg.GetRequest(), facts.Now)
	// A certificate of Kubernetes outlives its Node: it proves nothing for a name that is recorded.
	proven := renews || !known && err == nil && cert.Subject.CommonName == config.NodeUser+leaf.CN
	if err := s.enlist(ctx, facts, leaf.CN, roster.Record{Key: key, Address: peer}, proven); err != nil {
		return nil, err
	}
	leaf.Now = time.Now()
	signed, err := cfg.Machine.CA.CA().Sign(public, leaf)
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&apiv1.SignResponse{Certificate: signed}), nil
}

// enlist records who gets the name, if the machine may have it. proven: it has shown that it is the node.
func (s signer) enlist(ctx context.Context, facts roster.Facts, name string, r roster.Record, proven bool) error {
	if err := facts.MaySign(name, r.Key, r.Address, proven); err != nil {
		return connect.NewError(connect.CodePermissionDenied, err)
	}
	had, known := facts.Record(name)
	same := known && had.Key == r.Key
	if same && had.Address == r.Address {
		return nil
	}
	switch err := s.o.Enlist(ctx, name, facts.Renewed(name, r)); {
	case err != nil && same:
		s.log.Warn("the new address of a worker isn't recorded", "name", name, "err", err.Error())
	case err != nil:
		return connect.NewError(connect.CodeUnavailable, err)
	case !same:
		s.log.Info("the name of a worker is bound to its key", "name", name, "address", r.Address.String())
	}
	return nil
}

// renewedBy is the key (pki.KeyID) of the certificate of the machine API that has signed a request for its
// own name, or "".
func renewedBy(msg *apiv1.SignRequest, authorities []byte, name string, now time.Time) string {
	cert, err := pki.CheckProof(msg.GetProof(), authorities, secrets.RenewPurpose, msg.GetRequest(), now)
	if err != nil || cert.Subject.CommonName != name {
		return ""
	}
	key, _ := pki.KeyID(cert.PublicKey)
	return key
}

// serve answers trustd until ctx ends.
func (s signer) serve(ctx context.Context, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewTrustServiceHandler(s, connect.WithReadMaxBytes(maxBody)))
	server := &http.Server{
		Handler: mux, ReadTimeout: callTimeout, WriteTimeout: signTimeout + callTimeout, IdleTimeout: callTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelInfo),
	}
	return tlsserver.Until(ctx, server, 0, func() error { return server.Serve(listener) })
}

// asking is trustd's way to PID 1.
func asking(socket string) func(ctx context.Context, msg *apiv1.SignRequest, peer netip.Addr) ([]byte, error) {
	client := garboardv1connect.NewTrustServiceClient(&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		IdleConnTimeout: callTimeout / 2,
	}}, "http://"+ID, connect.WithReadMaxBytes(maxBody))
	return func(ctx context.Context, msg *apiv1.SignRequest, peer netip.Addr) ([]byte, error) {
		ctx, cancel := context.WithTimeout(ctx, signTimeout)
		defer cancel()
		request := connect.NewRequest(msg)
		request.Header().Set(peerHeader, peer.String())
		answer, err := client.Sign(ctx, request)
		if err != nil {
			return nil, err
		}
		return answer.Msg.GetCertificate(), nil
	}
}
