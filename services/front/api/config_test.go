package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// document is a configuration of a control plane, and its text.
func document(t testing.TB) (*config.Config, []byte) {
	t.Helper()
	c, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443", Hostname: "n1"})
	must(t, err)
	text, err := c.Encode()
	must(t, err)
	c, _, err = config.Load("test", text)
	must(t, err)
	return c, text
}

func TestGetConfigShowsSecretsToAdministratorsOnly(t *testing.T) {
	r := newRig(t)
	c, text := document(t)
	try := time.Unix(5000, 0)
	r.applier.texts = map[uint64][]byte{0: text, 3: text}
	r.applier.situation = configuration.Situation{Version: 3, Staged: true, Try: try}
	r.serve()
	for _, test := range []struct {
		name     string
		headers  map[string]string
		req      *apiv1.GetConfigRequest
		redacted bool
	}{
		{"admin", admin, &apiv1.GetConfigRequest{}, false},
		{"admin, an old one", admin, &apiv1.GetConfigRequest{Version: 3}, false},
		{"admin who asks for it", admin, &apiv1.GetConfigRequest{Redact: true}, true},
		{"operator", operator, &apiv1.GetConfigRequest{}, true},
		{"reader", reader, &apiv1.GetConfigRequest{Version: 3}, true},
		{"pretended administrator", identity("os:admins", " OS:ADMIN", "os:reader"), &apiv1.GetConfigRequest{}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			res, err := ask(t, garboardv1connect.NewConfigServiceClient(r.as(test.headers), host).Get, test.req)
			must(t, err)
			if shown := strings.Contains(string(res.GetDocument()), string(c.Machine.Token)); shown == test.redacted || res.GetRedacted() != test.redacted {
				t.Errorf("token shown: %t, redacted: %t", shown, res.GetRedacted())
			}
			if res.GetVersion() != 3 || !res.GetStaged() || !res.GetTryUntil().AsTime().Equal(try) || len(res.GetDigest()) != 64 {
				t.Errorf("got %v", res)
			}
		})
	}
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	_, err := ask(t, client.Get, &apiv1.GetConfigRequest{Version: 9})
	wantCode(t, err, connect.CodeNotFound, "version 9 isn't in the history")
	delete(r.applier.texts, 0)
	_, err = ask(t, client.Get, &apiv1.GetConfigRequest{})
	wantCode(t, err, connect.CodeFailedPrecondition, "gbctl apply-config")
}

func TestApplyAsksForWhatTheCallerMeans(t *testing.T) {
	r := newRig(t)
	deadline := time.Unix(6000, 0)
	r.applier.result = configuration.Result{
		Changes:  []config.Change{{Path: "machine.network.hostname", Op: config.Changed, Old: "a", New: "b", Effect: config.Live, Note: "n"}},
		Warnings: []config.Warning{{Problem: config.Problem{What: "odd"}}},
		Mode:     configuration.Try, Rebooting: true, Restarted: []string{"kubelet"}, Deadline: deadline, Version: 7,
	}
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	res, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{
		Document: []byte("version: v1alpha1"), Mode: apiv1.ApplyMode_APPLY_MODE_TRY, TryTimeout: durationpb.New(20 * time.Second), DryRun: true, Base: "abc",
	})
	must(t, err)
	want := &apiv1.ApplyConfigResponse{
		Changes:  []*apiv1.ConfigChange{{Path: "machine.network.hostname", Kind: "changed", Old: "a", New: "b", Effect: "live", Note: "n"}},
		Warnings: []string{config.Warning{Problem: config.Problem{What: "odd"}}.String()},
		Mode:     apiv1.ApplyMode_APPLY_MODE_TRY, Reboot: true, Restarts: []string{"kubelet"}, TryUntil: timestamppb.New(deadline), Version: 7,
	}
	if diff := cmp.Diff(want, res, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	// A node that Kubernetes may know by its former name says so; one that gets the name that it has does not.
	for name, want := range map[string]string{"a": "kubectl delete node a", "b": ""} {
		must(t, network.Hostnames.Put(r.opts.Store.As("test"), network.HostnameID, name))
		res, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x"), DryRun: true})
		must(t, err)
		if got := strings.Join(res.GetWarnings(), " "); strings.Contains(got, "kubectl delete node") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("as %s: warnings %q, want %q", name, got, want)
		}
	}
	r.applier.requests = r.applier.requests[:1]
	for i := range 5 {
		_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x"), Mode: apiv1.ApplyMode(i)})
		must(t, err)
	}
	var modes []configuration.Mode
	for _, request := range r.applier.done() {
		modes = append(modes, request.Mode)
	}
	if diff := cmp.Diff([]configuration.Mode{configuration.Auto, configuration.Immediate, configuration.OnReboot, configuration.Reboot, configuration.Try}, modes); diff != "" {
		t.Error(diff)
	}
	first := configuration.Request{Text: []byte("version: v1alpha1"), Mode: configuration.Try, TryTimeout: 20 * time.Second, DryRun: true, By: "jane", Base: "abc"}
	if diff := cmp.Diff(first, r.applier.requests[0]); diff != "" {
		t.Error(diff)
	}
	for name, bad := range map[string]*apiv1.ApplyConfigRequest{
		"empty":       {},
		"no mode":     {Document: []byte("x"), Mode: 17},
		"short try":   {Document: []byte("x"), Mode: apiv1.ApplyMode_APPLY_MODE_TRY, TryTimeout: durationpb.New(time.Second)},
		"long try":    {Document: []byte("x"), Mode: apiv1.ApplyMode_APPLY_MODE_TRY, TryTimeout: durationpb.New(2 * time.Hour)},
		"odd try":     {Document: []byte("x"), Mode: apiv1.ApplyMode_APPLY_MODE_TRY, TryTimeout: &durationpb.Duration{Seconds: 1 << 62}},
		"try for now": {Document: []byte("x"), TryTimeout: durationpb.New(time.Minute)},
	} {
		if _, err := ask(t, client.Apply, bad); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := len(r.applier.done()); n != 5 {
		t.Errorf("%d requests came through", n)
	}
}

// A restart of etcd for a configuration needs the cluster's consent, unless it is forced.
func TestApplyThatRestartsEtcd(t *testing.T) {
	r := newRig(t)
	r.opts.Interrupt = func(_ context.Context, what string, force bool, do func() error) (string, error) {
		if !force {
			return "", fmt.Errorf("%s: %w", what, etcd.ErrQuorum)
		}
		return "", do()
	}
	r.applier.result = configuration.Result{Mode: configuration.Immediate, Restarted: []string{"etcd"}}
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x")})
	wantCode(t, err, connect.CodeFailedPrecondition, "etcd would restart for this: apply-config: the cluster would lose its quorum", "--on-reboot")
	for _, dry := range r.applier.done() {
		t.Errorf("applied: %+v", dry)
	}
	_, err = ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x"), Force: true})
	must(t, err)
	if n := len(r.applier.done()); n != 1 {
		t.Errorf("%d requests came through", n)
	}
}

// Another node's operation has the lock of the cluster: this node only counts the members.
func TestPeerRestartsEtcd(t *testing.T) {
	r := newRig(t)
	r.opts.Interrupt = func(context.Context, string, bool, func() error) (string, error) {
		return "", errors.New("the lock is held")
	}
	r.opts.InterruptLocked = func(_ context.Context, _ string, _ bool, do func() error) (string, error) { return "", do() }
	r.applier.texts = map[uint64][]byte{0: []byte("machine: {}\n")}
	r.applier.result = configuration.Result{Mode: configuration.Immediate, Restarted: []string{"etcd"}}
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(identity(contract.Peer)), host)
	_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Patch: []byte("machine: {}"), Base: configuration.Digest([]byte("machine: {}\n")), Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE})
	must(t, err)
	if n := len(r.applier.done()); n != 1 {
		t.Errorf("%d requests came through", n)
	}
}

// A reboot for a configuration is asked what any other reboot is.
func TestApplyThatMayNotReboot(t *testing.T) {
	r := newRig(t)
	r.opts.Reboot = func(_ context.Context, _ string, force bool, do func() error) (string, error) {
		if !force {
			return "", errors.New("the cluster would lose its quorum")
		}
		return "", do()
	}
	r.applier.texts = map[uint64][]byte{1: nil}
	r.applier.result = configuration.Result{Mode: configuration.Reboot, Rebooting: true}
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x")})
	wantCode(t, err, connect.CodeFailedPrecondition, "the node would reboot for this: the cluster would lose its quorum", "--on-reboot")
	_, err = ask(t, client.Rollback, &apiv1.RollbackConfigRequest{Version: 1})
	wantCode(t, err, connect.CodeFailedPrecondition, "the cluster would lose its quorum")
	if all := r.applier.done(); len(all) != 0 {
		t.Errorf("applied: %+v", all)
	}
	_, err = ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x"), DryRun: true})
	must(t, err)
	// What takes no reboot is nobody else's business.
	r.applier.result = configuration.Result{Mode: configuration.OnReboot}
	_, err = ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x")})
	must(t, err)
	if all := r.applier.done(); len(all) != 1 {
		t.Errorf("applied: %+v", all)
	}
}

func TestErrorsOfApplyAreWhatAClientDecidesOn(t *testing.T) {
	r := newRig(t).serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	for _, test := range []struct {
		err  error
		code connect.Code
	}{
		{config.Problems{{What: "unknown key"}}, connect.CodeInvalidArgument},
		{&configuration.NeedsReboot{Paths: []string{"machine.install.disk"}}, connect.CodeFailedPrecondition},
		{configuration.ErrNothingToConfirm, connect.CodeFailedPrecondition},
		{configuration.ErrNoConfig, connect.CodeFailedPrecondition},
		{configuration.ErrStale, connect.CodeAborted},
		{configuration.ErrBusy, connect.CodeUnavailable},
		{&fs.PathError{Op: "write", Path: "x", Err: errors.New("no space")}, connect.CodeInternal},
		{errors.New("persist is false"), connect.CodeFailedPrecondition},
	} {
		r.applier.err = fmt.Errorf("apply configuration: %w", test.err)
		_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("x")})
		wantCode(t, err, test.code, test.err.Error())
		_, err = ask(t, client.Rollback, &apiv1.RollbackConfigRequest{})
		wantCode(t, err, test.code)
		_, err = ask(t, client.Confirm, &apiv1.ConfirmConfigRequest{})
		wantCode(t, err, test.code)
	}
}

func TestHistoryAndRollback(t *testing.T) {
	r := newRig(t)
	r.applier.texts = map[uint64][]byte{1: nil, 2: nil}
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	res, err := ask(t, client.History, &apiv1.ConfigHistoryRequest{})
	must(t, err)
	if v := res.GetVersions(); len(v) != 2 || v[0].GetVersion() != 2 || v[0].GetMode() != apiv1.ApplyMode_APPLY_MODE_TRY || v[0].GetBy() != "joe" {
		t.Errorf("history: %v", res)
	}
	back, err := ask(t, client.Rollback, &apiv1.RollbackConfigRequest{Version: 1, Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE})
	must(t, err)
	if done := r.applier.done(); back.GetVersion() != 1 || len(done) != 1 || done[0].Mode != configuration.Immediate {
		t.Errorf("rolled back to %v by %+v", back, r.applier.requests)
	}
	_, err = ask(t, client.Rollback, &apiv1.RollbackConfigRequest{Version: 5})
	wantCode(t, err, connect.CodeNotFound, "version 5")
	_, err = ask(t, client.Confirm, &apiv1.ConfirmConfigRequest{})
	must(t, err)
	if diff := cmp.Diff([]string{"jane"}, r.applier.confirmed); diff != "" {
		t.Error(diff)
	}
}

// TestUnknownClientsConfigureANodeOnce has many clients try at once.
func TestUnknownClientsConfigureANodeOnce(t *testing.T) {
	r := newRig(t)
	stages := r.opts.Store.As(configuration.ID)
	must(t, configuration.Stages.Put(stages, configuration.StageID, configuration.Maintenance))
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(unknownClient), host)
	_, err := ask(t, client.Get, &apiv1.GetConfigRequest{})
	wantCode(t, err, connect.CodeFailedPrecondition, "maintenance mode")

	var wg sync.WaitGroup
	errs := make(chan error, 20)
	for range cap(errs) {
		wg.Go(func() {
			_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("mine")})
			errs <- err
		})
	}
	wg.Wait()
	close(errs)
	taken := 0
	for err := range errs {
		if err == nil {
			taken++
			continue
		}
		wantCode(t, err, connect.CodeFailedPrecondition, "has a configuration")
	}
	if taken != 1 || len(r.applier.requests) != 1 {
		t.Errorf("%d were taken, %d asked for", taken, len(r.applier.requests))
	}
	if !r.applier.requests[0].First {
		t.Error("an unknown client's configuration isn't for a node without one only")
	}
	if by := r.applier.requests[0].By; by != "maintenance mode, from 10.5.0.9:41000" {
		t.Errorf("by %q", by)
	}
	must(t, configuration.Stages.Delete(stages, configuration.StageID))
	_, err = ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("mine")})
	wantCode(t, err, connect.CodeUnavailable, "still looking")
}

// Who has no certificate must say that the system needs no signature.
func TestUnsignedSystemNeedsLeave(t *testing.T) {
	for unsigned, refused := range map[bool]error{false: configuration.ErrUnsigned, true: nil} {
		r := newRig(t)
		r.applier.err = refused
		must(t, configuration.Stages.Put(r.opts.Store.As(configuration.ID), configuration.StageID, configuration.Maintenance))
		r.serve()
		client := garboardv1connect.NewConfigServiceClient(r.as(unknownClient), host)
		_, err := ask(t, client.Apply, &apiv1.ApplyConfigRequest{Document: []byte("mine"), Unsigned: unsigned})
		if asked := r.applier.requests; len(asked) != 1 || !asked[0].First || asked[0].Unsigned != unsigned {
			t.Errorf("unsigned %t: asked for %+v", unsigned, asked)
		}
		if refused == nil {
			must(t, err)
		} else {
			wantCode(t, err, connect.CodeFailedPrecondition, "gbctl apply-config --insecure --unsigned says that you want this")
		}
	}
}

// A patch is merged into the node's own document, and counts only for that one.
func TestApplyPatch(t *testing.T) {
	r := newRig(t)
	text := []byte("# mine\nversion: v1alpha1\nmachine:\n  type: worker # for now\n")
	r.applier.texts = map[uint64][]byte{0: text}
	r.serve()
	apply := func(headers map[string]string, req *apiv1.ApplyConfigRequest) error {
		_, err := ask(t, garboardv1connect.NewConfigServiceClient(r.as(headers), host).Apply, req)
		return err
	}
	patch := []byte(`{"machine": {"token": "x"}}`)
	must(t, apply(admin, &apiv1.ApplyConfigRequest{Patch: patch}))
	must(t, apply(identity(contract.Peer), &apiv1.ApplyConfigRequest{Patch: patch, Base: "of an earlier one", Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE}))
	for i, base := range []string{configuration.Digest(text), "of an earlier one"} {
		got := r.applier.done()[i]
		if want := "# mine\nversion: v1alpha1\nmachine:\n  type: worker # for now\n  token: x\n"; string(got.Text) != want || got.Base != base {
			t.Errorf("base %q, text %s", got.Base, got.Text)
		}
	}
	wantCode(t, apply(admin, &apiv1.ApplyConfigRequest{Patch: patch, Document: text}), connect.CodeInvalidArgument, "send one of them")
	wantCode(t, apply(admin, &apiv1.ApplyConfigRequest{Patch: []byte("[]")}), connect.CodeInvalidArgument, "patch")
	wantCode(t, apply(admin, &apiv1.ApplyConfigRequest{Patch: make([]byte, maxDocument+1)}), connect.CodeInvalidArgument, "at most")
	if n := len(r.applier.done()); n != 2 {
		t.Errorf("%d were applied", n)
	}
}
