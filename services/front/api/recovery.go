package api

import (
	"context"
	"fmt"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// withKey calls do with the passphrase of a request.
func withKey(ctx context.Context, text []byte, do func(ctx context.Context, key string) error) error {
	key, err := contract.ParseRecoveryKey(string(text))
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	return cannot(do(ctx, key))
}

// cannot is the error of a machine that can't do it now.
func cannot(err error) error {
	if err == nil {
		return nil
	}
	return connect.NewError(connect.CodeFailedPrecondition, err)
}

func (s *nodeService) AddRecoveryKey(ctx context.Context, req *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), withKey(ctx, req.Msg.GetKey(), s.opts.Recovery.AddRecoveryKey)
}

func (s *nodeService) ListRecoveryKeys(ctx context.Context, _ *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	all, err := s.opts.Recovery.RecoveryKeys(ctx)
	res := &apiv1.RecoveryKeyResponse{}
	for _, k := range all {
		v := &apiv1.VolumeRecoveryKey{Volume: k.Label}
		for _, slot := range k.Slots {
			v.Slots, v.Added = append(v.Slots, uint32(slot)), timestamppb.New(k.Added)
		}
		res.Volumes = append(res.Volumes, v)
	}
	return connect.NewResponse(res), cannot(err)
}

func (s *nodeService) RemoveRecoveryKey(ctx context.Context, _ *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), cannot(s.opts.Recovery.RemoveRecoveryKey(ctx))
}

func (s *nodeService) Unlock(ctx context.Context, req *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return connect.NewResponse(&apiv1.RecoveryKeyResponse{}), withKey(ctx, req.Msg.GetKey(), s.opts.Recovery.Unlock)
}

// Nonces of Attest are as long as hashes are, more or less.
const minNonce, maxNonce = 16, 64

func (s *nodeService) Attest(_ context.Context, req *connect.Request[apiv1.AttestRequest]) (*connect.Response[apiv1.AttestResponse], error) {
	if n := len(req.Msg.GetNonce()); n < minNonce || n > maxNonce {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("a nonce has %d to %d bytes, and this one %d", minNonce, maxNonce, n))
	}
	q, system, err := s.opts.Recovery.Quote(req.Msg.GetNonce())
	res := &apiv1.AttestResponse{Quoted: q.Quoted, Signature: q.Signature, Key: q.Key, System: system, Signatures: q.Signatures, Pcrs: map[uint32][]byte{}}
	for pcr, value := range q.PCRs {
		res.Pcrs[uint32(pcr)] = value
	}
	return connect.NewResponse(res), cannot(err)
}
