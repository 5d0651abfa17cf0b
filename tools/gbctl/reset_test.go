package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/boot"
)

// resetNode counts the resets that it is asked for, and refuses them.
type resetNode struct {
	garboardv1connect.UnimplementedOperationServiceHandler
	asked atomic.Int32
}

func (n *resetNode) Reset(context.Context, *connect.Request[apiv1.ResetRequest]) (*connect.Response[apiv1.ResetResponse], error) {
	n.asked.Add(1)
	return nil, connect.NewError(connect.CodeFailedPrecondition, errDeclined)
}

// S-012: the question ends in [yes/no]: and waits, and any answer but yes aborts.
func TestS012Reset(t *testing.T) {
	node := &resetNode{}
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewOperationServiceHandler(node))
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": mux})
	config := &client.Config{Context: "x", Contexts: map[string]*client.Context{"x": a.loaded}}
	path := filepath.Join(t.TempDir(), "garboardconfig")
	if err := config.Save(path); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		answer string
		resets int32
		code   int
	}{
		{"no\n", 0, codeFailed},
		{"y\n", 0, codeFailed},
		{"\n", 0, codeFailed},
		{"yes, but\n", 0, codeFailed},
		{"\x04", 0, codeFailed}, // the end of the input
		{"yes\n", 1, codeRefused},
	} {
		x := newTerminal(t, 24, 80)
		cmd := exec.Command("gbctl", "--garboardconfig", path, "-n", "10.5.0.2", "reset")
		cmd.Env = append(os.Environ(), "TERM=xterm-256color")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = x.slave, x.slave, x.slave
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() }) // where it didn't end
		x.until("reset? [yes/no]: ")
		before := node.asked.Load()
		x.press(tt.answer)
		_ = cmd.Wait()
		_ = x.slave.Close()
		<-x.read
		_ = x.master.Close()
		if code, resets := cmd.ProcessState.ExitCode(), node.asked.Load()-before; code != tt.code || resets != tt.resets || before != 0 {
			t.Errorf("%q: exit code %d, %d resets, %d before the answer:\n%s", tt.answer, code, resets, before, x.said.String())
		}
	}
}

// Who is asked is told of all that goes, and of nothing else.
func TestLoss(t *testing.T) {
	all := resetQuestion([]string{"n1"}, &apiv1.ResetRequest{})
	for _, label := range boot.WipeLabels {
		one := resetQuestion([]string{"n1", "n2"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{label}})
		if wipedData[label] == "" || !strings.Contains(all, wipedData[label]) || !strings.HasPrefix(one, "Nodes n1, n2 lose, each, for good: "+wipedData[label]+".") || strings.Contains(one, "TPM") != (label == boot.LabelState) {
			t.Errorf("%s: %q, alone %q", label, all, one)
		}
	}
	disks := resetQuestion([]string{"n1"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{boot.LabelState}, UserDisksToWipe: []string{"/dev/sdb", "/dev/sdc"}})
	if !strings.Contains(disks, "; all data on /dev/sdb, /dev/sdc.") {
		t.Errorf("with disks: %q", disks)
	}
}
