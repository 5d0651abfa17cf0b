package api

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/volumes"
)

// sealed is a disk with a recovery key.
type sealed struct {
	key    string
	opened bool
}

func (d *sealed) AddRecoveryKey(_ context.Context, key string) error {
	d.key = key
	return nil
}

func (d *sealed) RecoveryKeys(context.Context) ([]luks.RecoveryKey, error) {
	if d.key == "" {
		return nil, disks.ErrNoSystem
	}
	return []luks.RecoveryKey{{Label: "STATE", Encrypted: true, Slots: []int{31}, Added: time.Unix(1, 0)}}, nil
}

func (d *sealed) RemoveRecoveryKey(context.Context) error {
	d.key = ""
	return nil
}

func (d *sealed) Quote(nonce []byte) (q tpm.Quote, system []byte, err error) {
	if d.key == "" {
		return q, nil, tpm.ErrNone
	}
	return tpm.Quote{Quoted: nonce, PCRs: map[uint][]byte{7: []byte("seven")}}, []byte("system"), nil
}

func (d *sealed) Unlock(_ context.Context, key string) error {
	if key != d.key {
		return errors.New("it isn't the recovery key of STATE")
	}
	d.opened = true
	return nil
}

// A proof needs a nonce of the caller, and a TPM.
func TestAttest(t *testing.T) {
	r, disk := newRig(t), &sealed{}
	r.opts.Recovery = disk
	r.serve()
	node := garboardv1connect.NewNodeServiceClient(r.as(admin), host)
	nonce := []byte("0123456789abcdef")
	_, err := ask(t, node.Attest, &apiv1.AttestRequest{Nonce: nonce})
	wantCode(t, err, connect.CodeFailedPrecondition, "no TPM 2.0")
	disk.key = "a key"
	for _, n := range []int{0, 15, 65} {
		_, err = ask(t, node.Attest, &apiv1.AttestRequest{Nonce: make([]byte, n)})
		wantCode(t, err, connect.CodeInvalidArgument, "16 to 64 bytes")
	}
	answer, err := ask(t, node.Attest, &apiv1.AttestRequest{Nonce: nonce})
	if must(t, err); string(answer.Quoted) != string(nonce) || string(answer.Pcrs[7]) != "seven" || string(answer.System) != "system" {
		t.Errorf("%v", answer)
	}
}

// A recovery key is for administrators, and is in no log.
func TestRecoveryKeys(t *testing.T) {
	r, disk := newRig(t), &sealed{}
	r.opts.Recovery = disk
	must(t, volumes.Statuses.Put(r.opts.Store.As("runtime.VolumeController"), "STATE", volumes.Status{NoRecovery: true}))
	r.serve()
	node := garboardv1connect.NewNodeServiceClient(r.as(admin), host)
	_, err := ask(t, node.ListRecoveryKeys, &apiv1.RecoveryKeyRequest{})
	wantCode(t, err, connect.CodeFailedPrecondition, "no system disk")
	status, err := ask(t, node.Status, &apiv1.NodeStatusRequest{})
	if must(t, err); len(status.Notices) != 1 || !strings.Contains(status.Notices[0], "STATE can't be opened in another machine") {
		t.Errorf("%q", status.Notices)
	}
	key := client.NewRecoveryKey()
	_, err = ask(t, node.AddRecoveryKey, &apiv1.RecoveryKeyRequest{Key: []byte(key[1:])})
	wantCode(t, err, connect.CodeInvalidArgument, "group 1 of the recovery key has 7 characters")
	_, err = ask(t, node.AddRecoveryKey, &apiv1.RecoveryKeyRequest{Key: []byte(strings.ToUpper(key))})
	if must(t, err); disk.key != key {
		t.Errorf("%q", disk.key)
	}
	all, err := ask(t, node.ListRecoveryKeys, &apiv1.RecoveryKeyRequest{})
	if must(t, err); len(all.Volumes) != 1 || all.Volumes[0].Slots[0] != 31 || all.Volumes[0].Added.Seconds != 1 {
		t.Errorf("%v", all)
	}
	_, err = ask(t, garboardv1connect.NewNodeServiceClient(r.as(operator), host).RemoveRecoveryKey, &apiv1.RecoveryKeyRequest{})
	wantCode(t, err, connect.CodePermissionDenied, "needs role os:admin")
	_, err = ask(t, node.RemoveRecoveryKey, &apiv1.RecoveryKeyRequest{})
	if must(t, err); disk.key != "" {
		t.Error("it is still there")
	}
	lines := strings.Join(r.opts.Logs.Tail(AuditID, 100), "\n")
	if strings.Count(lines, "AddRecoveryKey") != 2 || strings.Contains(strings.ToLower(lines), key[1:8]) {
		t.Error(lines)
	}
}

// While STATE is locked, whoever reaches the node can unlock it with its key, and do nothing else, whatever mode the
// gate reports.
func TestLockedNodeTakesItsKeyAndNothingElse(t *testing.T) {
	r, key := newRig(t), client.NewRecoveryKey()
	disk := &sealed{key: key}
	r.opts.Recovery = disk
	stages := r.opts.Store.As(configuration.ID)
	must(t, configuration.Stages.Put(stages, configuration.StageID, configuration.Locked))
	r.serve()
	locked := maps.Clone(unknownClient)
	locked[contract.HeaderMode] = contract.ModeLocked
	for _, headers := range []map[string]string{locked, unknownClient} {
		_, err := ask(t, garboardv1connect.NewConfigServiceClient(r.as(headers), host).Apply, &apiv1.ApplyConfigRequest{Document: []byte("mine")})
		wantCode(t, err, connect.CodeFailedPrecondition, "unlock it first")
		node := garboardv1connect.NewNodeServiceClient(r.as(headers), host)
		operations := garboardv1connect.NewOperationServiceClient(r.as(headers), host)
		for what, ask := range map[string]func() error{
			"disks": func() error { _, err := ask(t, node.Disks, &apiv1.DisksRequest{}); return err },
			"reset": func() error { _, err := ask(t, operations.Reset, &apiv1.ResetRequest{}); return err },
			"add": func() error {
				_, err := ask(t, node.AddRecoveryKey, &apiv1.RecoveryKeyRequest{Key: []byte(key)})
				return err
			},
		} {
			if err := ask(); connect.CodeOf(err) != connect.CodeFailedPrecondition {
				t.Errorf("%s: %v", what, err)
			}
		}
		_, err = ask(t, node.Version, &apiv1.VersionRequest{})
		must(t, err)
	}
	if len(r.applier.requests) > 0 {
		t.Error("a stranger's configuration was taken")
	}
	node := garboardv1connect.NewNodeServiceClient(r.as(locked), host)
	_, err := ask(t, node.Unlock, &apiv1.RecoveryKeyRequest{Key: []byte(client.NewRecoveryKey())})
	wantCode(t, err, connect.CodeFailedPrecondition, "isn't the recovery key")
	_, err = ask(t, node.Unlock, &apiv1.RecoveryKeyRequest{Key: []byte(key)})
	if must(t, err); !disk.opened {
		t.Error("it isn't open")
	}

	// Afterwards it is for administrators, and no method of a node without a configuration.
	for stage, want := range map[configuration.Stage]string{configuration.Configured: "has a configuration", configuration.Maintenance: "in maintenance mode, in which"} {
		must(t, configuration.Stages.Put(stages, configuration.StageID, stage))
		_, err = ask(t, node.Unlock, &apiv1.RecoveryKeyRequest{Key: []byte(key)})
		wantCode(t, err, connect.CodeFailedPrecondition, want)
	}
}
