package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func seconds(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Second) }

// waitingNode is a control plane during its first minutes.
func waitingNode(node int) snapshot {
	services := &apiv1.ListServicesResponse{SinceBoot: seconds(125)}
	for i, id := range []string{"apid", "containerd", "disks", "files", "kubelet", "machined", "networkd", "timed", "udevd"} {
		services.Services = append(services.Services, &apiv1.Service{Id: id, State: "Running", Health: "OK", Up: true, Message: "Health check successful", Since: seconds(3 + i)})
	}
	etcd := &apiv1.Service{Id: "etcd", State: "Waiting", Health: "?", WaitingFor: `service "networkd" to be "up", and the cluster to be bootstrapped`, Since: seconds(5), Restarts: 2}
	services.Services = slices.Insert(services.Services, 3, etcd)
	list, err := replay[apiv1.ListResourcesResponse]("ResourceService/List", &apiv1.ListResourcesRequest{Type: "staticpodstatus"})
	if err != nil {
		panic(err)
	}
	pods := &apiv1.ListResourcesResponse{Definition: list.Msg.Definition}
	for name, ready := range map[string]string{"kube-apiserver-cp-1": "True", "kube-scheduler-cp-1": "False"} {
		pods.Items = append(pods.Items, &apiv1.Resource{Id: "kube-system/" + name, Columns: []string{ready}})
	}
	return snapshot{
		node: node, at: noon, services: services, pods: pods,
		etcd: &apiv1.ListResourcesResponse{Items: []*apiv1.Resource{{Id: "etcd", Spec: "ready: false\nendpoint: https://127.0.0.1:2379\n"}}},
		status: &apiv1.NodeStatusResponse{
			Hostname: "cp-1", MachineType: "controlplane", Cluster: "home", Version: "v0.1.0", Uptime: seconds(125), Load1: 0.42, Cpus: 2,
			MemoryTotal: 4 << 30, MemoryAvailable: 3 << 30, EphemeralTotal: 20 << 30, EphemeralAvailable: 1 << 30,
		},
	}
}

// screen drives a dashboard as a person and three nodes would: the third is off.
type screen struct {
	*dashboard
	followed []logTarget
}

func newScreen(width, height int) *screen {
	s := &screen{}
	s.dashboard = newDashboard([]string{"10.5.0.2", "10.5.0.3", "10.5.0.9"}, func(t logTarget) { s.followed = append(s.followed, t) })
	s.send(tea.WindowSizeMsg{Width: width, Height: height}, waitingNode(0))
	worker := waitingNode(1)
	worker.pods, worker.etcd = nil, nil
	worker.services.Services = slices.DeleteFunc(worker.services.Services, func(s *apiv1.Service) bool { return s.Id == "etcd" })
	worker.status.Hostname, worker.status.MachineType = "w-1", "worker"
	s.send(worker, snapshot{node: 2, at: noon, err: errors.New("can't be reached: connection refused. Is it on?")})
	s.send(eventsMsg{node: 0, again: true, events: []*apiv1.ServiceEvent{
		{Service: "etcd", State: "Waiting", Message: "waits", Time: timestamppb.New(noon)},
		{Service: "kubelet", State: "Running", Message: "Health check successful", Time: timestamppb.New(noon.Add(time.Second))},
	}})
	return s
}

func (s *screen) send(msgs ...tea.Msg) (cmd tea.Cmd) {
	for _, msg := range msgs {
		_, cmd = s.Update(msg)
	}
	return cmd
}

var named = map[string]tea.KeyPressMsg{
	"left": {Code: tea.KeyLeft}, "right": {Code: tea.KeyRight}, "up": {Code: tea.KeyUp}, "down": {Code: tea.KeyDown},
	"pgup": {Code: tea.KeyPgUp}, "pgdown": {Code: tea.KeyPgDown}, "end": {Code: tea.KeyEnd}, "ctrl+c": {Code: 'c', Mod: tea.ModCtrl},
}

func (s *screen) press(keys ...string) (cmd tea.Cmd) {
	for _, key := range keys {
		msg, ok := named[key]
		if !ok {
			msg = tea.KeyPressMsg{Code: rune(key[0]), Text: key}
		}
		cmd = s.send(msg)
	}
	return cmd
}

// say sends numbered lines of the log that is followed.
func (s *screen) say(from, to int) {
	for i := from; i <= to; i++ {
		s.send(linesMsg{target: s.target, again: i == 1, lines: []string{fmt.Sprintf("line %d of %s", i, s.target.service)}})
	}
}

func (s *screen) text() string { return ansi.Strip(s.View().Content) }

func TestDashboardFrames(t *testing.T) {
	for name, size := range map[string][2]int{"80x24": {80, 24}, "120x40": {120, 40}} {
		s := newScreen(size[0], size[1])
		s.press("down", "down", "down")
		s.say(1, 30)
		var frames strings.Builder
		fmt.Fprintf(&frames, "%s\n\n", s.text())
		s.press("e", "right", "up")
		fmt.Fprintf(&frames, "%s\n\n", s.text())
		s.press("3")
		fmt.Fprintf(&frames, "%s\n", s.text())
		var got strings.Builder
		for line := range strings.Lines(frames.String()) {
			got.WriteString(strings.TrimRight(line, " \n") + "\n")
		}
		path := filepath.Join("testdata", "dashboard", name+".txt")
		if os.Getenv("UPDATE_SCRIPTS") != "" {
			if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got.String()); diff != "" {
			t.Errorf("%s: -want +got\n%s", name, diff)
		}
	}
}

func TestDashboardKeys(t *testing.T) {
	s := newScreen(80, 24)
	at := func(node int, service string) {
		t.Helper()
		if s.current != node || s.nodes[node].selected != service {
			t.Errorf("at %d %q, want %d %q", s.current, s.nodes[s.current].selected, node, service)
		}
		if service != "" && (s.target.node != node || s.target.service != service || s.followed[len(s.followed)-1] != s.target) {
			t.Errorf("the log of %v is followed, want %d %s", s.target, node, service)
		}
	}
	at(0, "apid")
	s.press("up")
	at(0, "apid")
	s.press("down", "j")
	at(0, "disks")
	s.press("right")
	at(1, "apid")
	s.press("left", "k")
	at(0, "containerd")
	s.press("left")
	at(2, "")
	s.press("right")
	at(0, "containerd")
	s.press("2")
	at(1, "apid")
	s.press("9", "0", "x")
	at(1, "apid")
	for range 50 {
		s.press("down")
	}
	at(1, "udevd")
	for _, key := range []string{"q", "ctrl+c"} {
		if cmd := s.press(key); cmd == nil || cmd() != (tea.QuitMsg{}) {
			t.Errorf("%s doesn't quit", key)
		}
	}
}

func TestDashboardLog(t *testing.T) {
	s := newScreen(80, 24)
	s.say(1, 100)
	shows := func(want, not string) {
		t.Helper()
		if text := s.text(); !strings.Contains(text, want+"\n") || strings.Contains(text, not+"\n") {
			t.Errorf("want %q, not %q:\n%s", want, not, text)
		}
	}
	shows("line 100 of apid", "line 80 of apid")
	s.press("pgup", "pgup")
	s.say(101, 110)
	shows("line 88 of apid", "line 110 of apid") // it stays while one reads
	s.press("pgdown")
	s.press("end")
	shows("line 110 of apid", "line 88 of apid")
	for range 100 {
		s.press("pgup")
	}
	shows("line 1 of apid", "line 110 of apid")

	// Another service's log, and not what comes late of the one before.
	old := s.target
	s.press("down")
	s.send(linesMsg{target: old, lines: []string{"late"}})
	s.say(1, 3)
	shows("line 3 of containerd", "late")
	s.send(linesMsg{target: s.target, lost: 7, lines: []string{"after"}})
	shows("(7 lines were lost: they were written too fast)", "late")
	s.send(linesMsg{target: s.target, err: errors.New("no such log")})
	shows("LOG of containerd (no such log)", "late")
	s.say(1, keptLines*3)
	if len(s.lines) > 2*keptLines {
		t.Errorf("%d lines are kept", len(s.lines))
	}
	s.press("pgup")
	s.say(2, keptLines*3) // and what was on the screen is among those that aren't
	if text := s.text(); strings.Count(text, " of containerd\n") < 4 {
		t.Errorf("the screen is empty:\n%s", text)
	}
}

// A node that falls silent is shown as it was, and since when; one that comes
// back is as before.
func TestDashboardSilence(t *testing.T) {
	s := newScreen(80, 24)
	for i := range 3 {
		s.send(snapshot{node: 0, at: noon.Add(time.Duration(i+1) * time.Second), err: errors.New("no route")})
	}
	if text := s.text(); !strings.Contains(text, "cp-1 · silent for 3s: no route") || !strings.Contains(text, "1 10.5.0.2 silent") || !strings.Contains(text, "etcd ") {
		t.Errorf("silent:\n%s", text)
	}
	s.press("3")
	if text := s.text(); !strings.Contains(text, "no answer; retrying every 2s") || !strings.Contains(text, "Is it on?") {
		t.Errorf("never heard of:\n%s", text)
	}
	s.send(waitingNode(0), waitingNode(2))
	if text := s.text(); strings.Contains(text, "silent") || !strings.Contains(text, "3 10.5.0.9 waits") || s.target.node != 2 {
		t.Errorf("back:\n%s", text)
	}
	// A release that doesn't know all of it.
	part := waitingNode(2)
	part.status, part.err = nil, errors.New("doesn't support this request")
	s.send(part)
	if text := s.text(); !strings.Contains(text, "10.5.0.9 · doesn't support") || !strings.Contains(text, "load is unknown") || !strings.Contains(text, "containerd") {
		t.Errorf("a part:\n%s", text)
	}
}

// Whatever nodes say, and however large the window is, the screen is as high and
// as wide as it, and nothing but our own styles reaches the terminal.
func TestDashboardFits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evil := rapid.StringOf(rapid.SampledFrom([]rune("aé漢🙂\x1b[]\x07\x9b\r\n\t;2J31m\u202e\u0301"))).Draw(t, "text")
		width, height := rapid.IntRange(1, 200).Draw(t, "width"), rapid.IntRange(1, 80).Draw(t, "height")
		s := newScreen(width, height)
		n := waitingNode(0)
		n.status.Hostname, n.status.Cluster = evil, evil
		for _, service := range n.services.Services[:rapid.IntRange(0, 10).Draw(t, "services")] {
			service.Id, service.State, service.Message, service.WaitingFor = evil+service.Id, evil, evil, evil
		}
		s.send(n, linesMsg{target: s.target, lines: []string{evil, evil}}, eventsMsg{node: 0, events: []*apiv1.ServiceEvent{{Service: evil, Message: evil}}})
		s.press(rapid.SliceOf(rapid.SampledFrom([]string{"down", "up", "left", "right", "e", "pgup", "pgdown", "3"})).Draw(t, "keys")...)
		rows := strings.Split(s.View().Content, "\n")
		if len(rows) > height || len(rows) != height && height >= leastHeight && width >= leastWidth {
			t.Fatalf("%d rows, want %d", len(rows), height)
		}
		for _, row := range rows {
			if w := ansi.StringWidth(row); w > width {
				t.Fatalf("%d columns, want %d: %q", w, width, row)
			}
			if strings.ContainsAny(ansi.Strip(row), "\x1b\x07\u009b\r\t\u202e") || strings.Contains(row, "2J\x07") {
				t.Fatalf("controls the terminal: %q", row)
			}
		}
	})
}
