package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// configService keeps documents as they are. A line "bad" is a problem in one, a
// changed line "type" takes a reboot, any other one restarts the kubelet.
type configService struct {
	garboardv1connect.UnimplementedConfigServiceHandler
	node *node

	text     string // guarded by node.mu, as all that follows
	versions uint64
	trying   bool
}

func firstConfig(kind string) string {
	return "# the first\nversion: v1alpha1\nmachine:\n  type: " + kind + "\n  kubelet:\n    image: kubelet:1\n"
}

func digestOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func (s *configService) Get(_ context.Context, r *connect.Request[apiv1.GetConfigRequest]) (*connect.Response[apiv1.GetConfigResponse], error) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if r.Msg.Version > 1 {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no version %d in the history", r.Msg.Version))
	}
	text := s.text
	if r.Msg.Version == 1 {
		text = firstConfig(s.node.kind)
	}
	m := &apiv1.GetConfigResponse{Document: []byte(text), Digest: digestOf(text), Version: s.versions, Redacted: r.Msg.Redact || s.node.mood == "redacts"}
	if s.node.mood == "raced" { // somebody else is quicker, once
		s.node.mood = ""
		s.text += "# of somebody else\n"
	}
	return answerWith(m)
}

func (s *configService) Apply(_ context.Context, r *connect.Request[apiv1.ApplyConfigRequest]) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if r.Msg.TryTimeout != nil && r.Msg.Mode != apiv1.ApplyMode_APPLY_MODE_TRY {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("a time to try is for mode try"))
	}
	text := string(r.Msg.Document)
	if r.Msg.Base != "" && r.Msg.Base != digestOf(s.text) {
		return nil, connect.NewError(connect.CodeAborted, fmt.Errorf("the configuration has changed meanwhile"))
	}
	if strings.Contains(text, "unsigned: true") && !r.Msg.Unsigned {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("a system although nobody vouches for it"))
	}
	var problems []string
	number := 0
	for line := range strings.Lines(text) {
		if number++; strings.TrimSpace(line) == "bad: 1" {
			problems = append(problems, fmt.Sprintf("config:%d:1: bad: there is no such key; did you mean \"cluster\"?", number))
		}
	}
	if len(problems) > 0 {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s", strings.Join(problems, "\n")))
	}
	lost := s.node.mood == "lost" // goes down before its answer is out
	m, err := s.take(text, r.Msg.Mode, r.Msg.DryRun, r.Msg.TryTimeout.AsDuration())
	if lost {
		panic(http.ErrAbortHandler)
	}
	return m, err
}

func (s *configService) take(text string, mode apiv1.ApplyMode, dry bool, try time.Duration) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	m := &apiv1.ApplyConfigResponse{}
	if text == s.text {
		m.Mode = apiv1.ApplyMode_APPLY_MODE_IMMEDIATE
		return answerWith(m)
	}
	reboot := typeOf(text) != typeOf(s.text)
	m.Changes = []*apiv1.ConfigChange{{Path: "machine.kubelet.image", Kind: "changed", Old: "kubelet:1", New: "kubelet:2", Effect: "service:kubelet", Note: "its pods keep running"}}
	m.Restarts = []string{"kubelet"}
	m.Mode = mode
	if mode == apiv1.ApplyMode_APPLY_MODE_AUTO {
		m.Mode = apiv1.ApplyMode_APPLY_MODE_IMMEDIATE
	}
	if reboot {
		m.Changes = append(m.Changes, &apiv1.ConfigChange{Path: "machine.type", Kind: "added", New: typeOf(text), Effect: "reboot"})
		if mode == apiv1.ApplyMode_APPLY_MODE_IMMEDIATE {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("a change of machine.type needs a reboot: use another mode"))
		}
		if mode == apiv1.ApplyMode_APPLY_MODE_AUTO {
			m.Mode = apiv1.ApplyMode_APPLY_MODE_REBOOT
		}
	}
	m.Reboot = m.Mode == apiv1.ApplyMode_APPLY_MODE_REBOOT || reboot && m.Mode == apiv1.ApplyMode_APPLY_MODE_TRY
	if m.Mode == apiv1.ApplyMode_APPLY_MODE_TRY && !dry && !reboot {
		s.trying = true
		m.TryUntil = timestamppb.New(time.Now().Add(try + time.Second/2))
	}
	if strings.Contains(text, "keySlot") {
		m.Warnings = []string{"config:3:5: keySlot is called slot"}
	}
	if m.Reboot && !dry {
		s.node.mood = "rebooting"
	}
	if !dry && m.Mode != apiv1.ApplyMode_APPLY_MODE_ON_REBOOT {
		s.text = text
		s.versions++
		m.Version = s.versions
	}
	return answerWith(m)
}

func typeOf(text string) string {
	_, rest, _ := strings.Cut(text, "type: ")
	line, _, _ := strings.Cut(rest, "\n")
	return line
}

func (s *configService) Confirm(context.Context, *connect.Request[apiv1.ConfirmConfigRequest]) (*connect.Response[apiv1.ConfirmConfigResponse], error) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if !s.trying {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("nothing is being tried"))
	}
	s.trying = false
	return answerWith(&apiv1.ConfirmConfigResponse{})
}

func (s *configService) History(context.Context, *connect.Request[apiv1.ConfigHistoryRequest]) (*connect.Response[apiv1.ConfigHistoryResponse], error) {
	return answerWith(&apiv1.ConfigHistoryResponse{Versions: []*apiv1.ConfigVersion{
		{Version: 2, Time: at(time.Minute), By: "admin", Mode: apiv1.ApplyMode_APPLY_MODE_ON_REBOOT, Summary: "machine.type", Current: true},
		{Version: 1, Time: at(0), By: "maintenance mode", Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE},
	}})
}

func (s *configService) Rollback(_ context.Context, r *connect.Request[apiv1.RollbackConfigRequest]) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	return s.take(firstConfig(s.node.kind), r.Msg.Mode, r.Msg.DryRun, r.Msg.TryTimeout.AsDuration())
}
