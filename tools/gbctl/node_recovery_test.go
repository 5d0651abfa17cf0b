package main

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// recoveryKeyOfTests opens the disk of the node in maintenance mode, whose disk is locked.
const recoveryKeyOfTests = "cbdefghi-jklnrtuv-cbdefghi-jklnrtuv-cbdefghi-jklnrtuv-cbdefghi-jklnrtuv"

// AddRecoveryKey of a node that isn't encrypted ("plain") is refused.
func (s nodeService) AddRecoveryKey(_ context.Context, r *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	if s.node.is("plain") {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("no volume of this machine is encrypted (machine.systemDiskEncryption)"))
	}
	if _, err := api.ParseRecoveryKey(string(r.Msg.Key)); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return answerWith(&apiv1.RecoveryKeyResponse{})
}

func (s nodeService) ListRecoveryKeys(context.Context, *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return answerWith(&apiv1.RecoveryKeyResponse{Volumes: []*apiv1.VolumeRecoveryKey{
		{Volume: "STATE", Slots: []uint32{31}, Added: at(0)}, {Volume: "EPHEMERAL"},
	}})
}

func (s nodeService) RemoveRecoveryKey(context.Context, *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	return answerWith(&apiv1.RecoveryKeyResponse{})
}

func (s nodeService) Unlock(_ context.Context, r *connect.Request[apiv1.RecoveryKeyRequest]) (*connect.Response[apiv1.RecoveryKeyResponse], error) {
	if string(r.Msg.Key) != recoveryKeyOfTests {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("it isn't the recovery key of STATE"))
	}
	return answerWith(&apiv1.RecoveryKeyResponse{})
}
