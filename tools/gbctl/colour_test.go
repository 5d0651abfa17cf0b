package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/charmbracelet/x/ansi"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// sickNode has a finding of each severity.
type sickNode struct {
	garboardv1connect.UnimplementedNodeServiceHandler
}

func (sickNode) Diagnose(context.Context, *connect.Request[apiv1.DiagnoseRequest]) (*connect.Response[apiv1.DiagnoseResponse], error) {
	return answerWith(&apiv1.DiagnoseResponse{Checked: []string{"disk"}, Findings: []*apiv1.Finding{
		{Id: "disk-full", Severity: apiv1.Finding_SEVERITY_ERROR, What: "the disk is full"},
		{Id: "disk-old", Severity: apiv1.Finding_SEVERITY_WARNING, What: "the disk is old"},
		{Id: "disk-there", Severity: apiv1.Finding_SEVERITY_INFO, What: "there is a disk"},
	}})
}

func (sickNode) Status(context.Context, *connect.Request[apiv1.NodeStatusRequest]) (*connect.Response[apiv1.NodeStatusResponse], error) {
	return answerWith(&apiv1.NodeStatusResponse{Hostname: "cp-1", Stage: "configured", KubernetesServes: "no", KubernetesLacks: "no API server"})
}

// onTerminal runs gbctl on a terminal, and returns what is there at the end.
func onTerminal(t *testing.T, env []string, args ...string) string {
	t.Helper()
	x := newTerminal(t, 24, 200)
	cmd := exec.Command("gbctl", args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = x.slave, x.slave, x.slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	_ = cmd.Run()
	_ = x.slave.Close()
	<-x.read
	_ = x.master.Close()
	return strings.ReplaceAll(x.said.String(), "\r\n", "\n")
}

// Words that say how something is have colours on a terminal, and nowhere else. The text and its columns are the same.
func TestColours(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewServiceServiceHandler(calmService{}))
	mux.Handle(garboardv1connect.NewNodeServiceHandler(sickNode{}))
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": mux})
	config := &client.Config{Context: "x", Contexts: map[string]*client.Context{"x": a.loaded}}
	path := filepath.Join(t.TempDir(), "garboardconfig")
	if err := config.Save(path); err != nil {
		t.Fatal(err)
	}
	const red, yellow, green = "\x1b[31m%s\x1b[m", "\x1b[33m%s\x1b[m", "\x1b[32m%s\x1b[m"
	for command, coloured := range map[string][]string{
		"services":         {fmt.Sprintf(green, "OK"), fmt.Sprintf(yellow, "Waiting")},
		"service apid":     {fmt.Sprintf(green, "OK")},
		"services -o json": nil,
		"health":           {fmt.Sprintf(red, "doesn't serve")},
		"doctor":           {fmt.Sprintf(red, "ERROR"), fmt.Sprintf(yellow, "WARNING")},
		"config add y":     {fmt.Sprintf(red, "error:")},
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"--garboardconfig", path, "-n", "10.5.0.2"}, strings.Fields(command)...)
			piped, _ := exec.Command("gbctl", args...).CombinedOutput()
			said := onTerminal(t, []string{"NO_COLOR=", "TERM=xterm"}, args...)
			if got := ansi.Strip(said); got != string(piped) {
				t.Errorf("on a terminal, without its colours:\n%s\nin a pipe:\n%s", got, piped)
			}
			for _, word := range coloured {
				if !strings.Contains(said, word) {
					t.Errorf("no %q in %q", word, said)
				}
			}
			if strings.Contains(said, "\x1b") != (coloured != nil) {
				t.Errorf("colours in %q", said)
			}
			for _, env := range [][]string{{"NO_COLOR=1", "TERM=xterm"}, {"NO_COLOR=", "TERM=dumb"}, {"NO_COLOR=", "TERM="}} {
				if said := onTerminal(t, env, args...); said != string(piped) {
					t.Errorf("%v: %q", env, said)
				}
			}
		})
	}
}
