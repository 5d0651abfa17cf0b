package api

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

func (r *rig) logs() garboardv1connect.LogServiceClient {
	return garboardv1connect.NewLogServiceClient(r.client(reader, true), host)
}

// readLog reads a log to its end.
func (r *rig) readLog(req *apiv1.ReadLogRequest) ([]string, error) {
	r.t.Helper()
	stream, err := r.logs().Read(r.t.Context(), connect.NewRequest(req))
	must(r.t, err)
	defer stream.Close()
	var lines []string
	for stream.Receive() {
		lines = append(lines, stream.Msg().GetLines()...)
	}
	return lines, stream.Err()
}

// following is a log as it comes in.
type following struct {
	t      testing.TB
	stream *connect.ServerStreamForClient[apiv1.LogChunk]
	lines  []string
	lost   uint64
}

func (r *rig) follow(req *apiv1.ReadLogRequest) *following {
	r.t.Helper()
	req.Follow = true
	ctx, cancel := context.WithTimeout(r.t.Context(), eventually.Scale(30*time.Second))
	r.t.Cleanup(cancel)
	stream, err := r.logs().Read(ctx, connect.NewRequest(req))
	must(r.t, err)
	return &following{t: r.t, stream: stream}
}

// want takes the next lines.
func (f *following) want(lines ...string) {
	f.t.Helper()
	for len(f.lines) < len(lines) {
		if !f.stream.Receive() {
			f.t.Fatalf("have %q, want %q: %v", f.lines, lines, f.stream.Err())
		}
		f.lines = append(f.lines, f.stream.Msg().GetLines()...)
		f.lost += f.stream.Msg().GetLost()
	}
	if diff := cmp.Diff(lines, f.lines[:len(lines)]); diff != "" {
		f.t.Error(diff)
	}
	f.lines = f.lines[len(lines):]
}

func TestS250LogsOfServices(t *testing.T) {
	r := newRig(t).serve()
	r.up("containerd")
	eventually.That(t, 10*time.Second, "the log of its start, which is written after the state has changed", func() error {
		if lines := r.opts.Logs.Tail("containerd", 1); len(lines) == 0 || !strings.Contains(lines[0], "Started task containerd") {
			return fmt.Errorf("the last is %q", lines)
		}
		return nil
	})
	w := r.opts.Logs.Writer("containerd")
	fmt.Fprint(w, "one\ntwo\xff\nthree\n")
	all := r.opts.Logs.Tail("containerd", 0)
	all[len(all)-2] = "two\uFFFD"
	for tail, want := range map[int32][]string{0: all, 2: all[len(all)-2:], 1 << 30: all, -1: nil} {
		for _, id := range []string{"containerd", "cri"} {
			lines, err := r.readLog(&apiv1.ReadLogRequest{Id: id, Tail: tail})
			must(t, err)
			if diff := cmp.Diff(want, lines); diff != "" {
				t.Errorf("%s, tail %d: %s", id, tail, diff)
			}
		}
	}
	f := r.follow(&apiv1.ReadLogRequest{Id: "cri", Tail: 1})
	f.want("three")
	fmt.Fprintln(w, "four")
	f.want("four")
	_, err := r.readLog(&apiv1.ReadLogRequest{Id: "vim"})
	wantCode(t, err, connect.CodeNotFound, "containerd", "namespace/pod:container")
	res, err := ask(t, r.logs().List, &apiv1.ListLogsRequest{})
	must(t, err)
	for _, id := range []string{"kubelet", "apid"} {
		if !slices.Contains(res.GetIds(), id) {
			t.Errorf("%s isn't listed: %v", id, res.GetIds())
		}
	}
}

// Lines before the current file, by the API and as NDJSON.
func TestPreviousLogsOfServices(t *testing.T) {
	r := newRig(t).serve()
	dir := filepath.Join(t.TempDir(), "log")
	before := logs.New(nil)
	must(t, before.Persist(dir, 1))
	fmt.Fprint(before.Writer("kubelet"), "one\ntwo\n")
	before.Release()
	_, err := r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Previous: true})
	wantCode(t, err, connect.CodeUnavailable, "EPHEMERAL isn't mounted")
	must(t, r.opts.Logs.Persist(dir, 2))
	t.Cleanup(r.opts.Logs.Release)
	for tail, want := range map[int32][]string{0: {"one", "two"}, 1: {"two"}, -1: nil} {
		lines, err := r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Previous: true, Tail: tail})
		must(t, err)
		if !slices.Equal(lines, want) {
			t.Errorf("tail %d: %q, want %q", tail, lines, want)
		}
	}
	lines, err := r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Boot: -1, Tail: 1})
	if err != nil || !slices.Equal(lines, []string{"two"}) {
		t.Errorf("of the boot before: %q, %v", lines, err)
	}
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Boot: 7})
	wantCode(t, err, connect.CodeNotFound, "there are no lines of boot 7; the files have those of: boot 1")
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Boot: -1, Previous: true})
	wantCode(t, err, connect.CodeInvalidArgument, "exclude each other")
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: "kubelet", Previous: true, Follow: true})
	wantCode(t, err, connect.CodeInvalidArgument, "exclude each other")
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: "default/web:web", Previous: true})
	wantCode(t, err, connect.CodeInvalidArgument, "is for the logs of services")
}

func TestAReaderThatStallsLearnsWhatItLost(t *testing.T) {
	r := newRig(t).serve()
	w := r.opts.Logs.Writer("chatty")
	fmt.Fprintln(w, "begin")
	f := r.follow(&apiv1.ReadLogRequest{Id: "chatty"})
	f.want("begin")
	began := time.Now()
	const lines = 20_000
	for i := range lines {
		fmt.Fprintln(w, strings.Repeat("x", 1000), i)
	}
	t.Logf("writing took %s", time.Since(began))
	fmt.Fprintln(w, "end")
	got := uint64(0)
	for f.stream.Receive() {
		got += uint64(len(f.stream.Msg().GetLines()))
		f.lost += f.stream.Msg().GetLost()
		if l := f.stream.Msg().GetLines(); len(l) > 0 && l[len(l)-1] == "end" {
			break
		}
	}
	must(t, f.stream.Err())
	if f.lost == 0 || got+f.lost != lines+1 {
		t.Errorf("%d lines came, %d were lost, of %d", got, f.lost, lines+1)
	}
}

// podLog is a file of the kubelet's directory.
func (r *rig) podLog(path string) string {
	r.t.Helper()
	file := filepath.Join(r.opts.PodLogs, path)
	must(r.t, os.MkdirAll(filepath.Dir(file), 0o755))
	return file
}

func appendTo(t testing.TB, file, text string) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	must(t, err)
	defer f.Close()
	_, err = f.WriteString(text)
	must(t, err)
}

// cri is a line as containerd writes it.
func cri(text string) string { return "2021-03-09T13:57:11.123456789Z stderr F " + text }

const apiserver = "kube-system/kube-apiserver-n1:kube-apiserver"

func TestS251LogsOfContainers(t *testing.T) {
	r := newRig(t)
	r.serve()
	res, err := ask(t, r.logs().List, &apiv1.ListLogsRequest{Kubernetes: true})
	must(t, err)
	if len(res.GetIds()) != 0 {
		t.Errorf("before any pod: %v", res.GetIds())
	}
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: apiserver, Kubernetes: true})
	wantCode(t, err, connect.CodeNotFound, "gbctl service kubelet")

	var long strings.Builder
	for i := range 20_000 {
		fmt.Fprintln(&long, cri(fmt.Sprint(i)))
	}
	appendTo(t, r.podLog("kube-system_kube-apiserver-n1_aaaa/kube-apiserver/0.log"), cri("the run before")+"\n")
	file := r.podLog("kube-system_kube-apiserver-n1_aaaa/kube-apiserver/10.log")
	appendTo(t, file, long.String()+cri("unfinished"))
	appendTo(t, r.podLog("kube-system_kube-apiserver-n1_aaaa/kube-apiserver/2.log"), cri("an earlier run")+"\n")
	appendTo(t, r.podLog("kube-system_kube-apiserver-n1_aaaa/kube-apiserver/10.log.20210309-135711"), cri("rotated")+"\n")
	appendTo(t, r.podLog("kube-system_coredns-1_bbbb/coredns/0.log"), "")
	all := strings.Split(long.String()+cri("unfinished"), "\n")

	for tail, want := range map[int32][]string{0: all, 1: all[len(all)-1:], 3: all[len(all)-3:], 5000: all[len(all)-5000:], 1 << 30: all, -1: nil} {
		lines, err := r.readLog(&apiv1.ReadLogRequest{Id: apiserver, Kubernetes: true, Tail: tail})
		must(t, err)
		if diff := cmp.Diff(want, lines); diff != "" {
			t.Errorf("tail %d: %s", tail, diff)
		}
	}
	lines, err := r.readLog(&apiv1.ReadLogRequest{Id: "kube-system/coredns-1:coredns"})
	must(t, err)
	if len(lines) != 0 {
		t.Errorf("an empty log: %q", lines)
	}
	res, err = ask(t, r.logs().List, &apiv1.ListLogsRequest{Kubernetes: true})
	must(t, err)
	if diff := cmp.Diff([]string{"kube-system/coredns-1:coredns", apiserver}, res.GetIds()); diff != "" {
		t.Error(diff)
	}
	_, err = r.readLog(&apiv1.ReadLogRequest{Id: "default/web:web"})
	wantCode(t, err, connect.CodeNotFound, apiserver)
}

func TestAContainersNameIsNoPath(t *testing.T) {
	r := newRig(t)
	appendTo(t, r.podLog("a_b_c/d/0.log"), "x\n")
	outside := filepath.Join(filepath.Dir(r.opts.PodLogs), "secret")
	appendTo(t, outside, "hush\n")
	must(t, os.Symlink(outside, r.podLog("out_pod_1/c/0.log")))
	must(t, os.Symlink(filepath.Dir(outside), filepath.Join(r.opts.PodLogs, "out_dir_1")))
	must(t, os.Mkdir(r.podLog("a_dir_1/c/0.log"), 0o755))
	r.serve()
	for _, id := range []string{
		"..", "../x:y", "a/..:d", "a/../b:d", "a/b:../d", "a/b:", "/b:d", "a/b", "a:b/c", "a/b:d/e", "a/b:d\x00", "A/b:d", "a/b_c:d",
		"a/b:" + strings.Repeat("d", 1000), "\xff/b:c", "a/b:d:e",
	} {
		if _, err := r.readLog(&apiv1.ReadLogRequest{Id: strings.ToValidUTF8(id, "?"), Kubernetes: true}); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%q: %v", id, err)
		}
	}
	for _, id := range []string{"out/pod:c", "out/dir:run", "a/dir:c"} {
		lines, err := r.readLog(&apiv1.ReadLogRequest{Id: id, Kubernetes: true})
		if err == nil || len(lines) > 0 {
			t.Errorf("%s: %q, %v", id, lines, err)
		}
	}
}

func TestAFollowerGoesOnOverRotationRestartAndANewPod(t *testing.T) {
	r := newRig(t)
	dir := "kube-system_kube-apiserver-n1_aaaa/kube-apiserver/"
	file := r.podLog(dir + "0.log")
	appendTo(t, r.podLog(dir+"0.log"), "1\n2\n")
	r.serve()
	f := r.follow(&apiv1.ReadLogRequest{Id: apiserver, Kubernetes: true, Tail: 1})
	f.want("2")
	appendTo(t, file, "3\n4 beg")
	f.want("3")
	appendTo(t, file, "un\n")
	f.want("4 begun")

	// Rotated; the container still writes to the old one for a moment, and there is
	// an older run beside it.
	must(t, os.Rename(file, file+".20210309"))
	appendTo(t, file+".20210309", "5\n")
	f.want("5")
	appendTo(t, file, "6\n")
	f.want("6")

	appendTo(t, r.podLog(dir+"1.log"), "7 after a restart\n")
	f.want("7 after a restart")
	// While 1.log is rotated, the latest there is is the run before.
	must(t, os.Rename(r.podLog(dir+"1.log"), r.podLog(dir+"1.log.2021")))
	appendTo(t, r.podLog(dir+"1.log.2021"), "8\n")
	f.want("8")
	appendTo(t, r.podLog(dir+"1.log"), "9\n")
	f.want("9")

	// A new pod of the name: its directory comes while the old one is still there.
	after := r.podLog("kube-system_kube-apiserver-n1_bbbb/kube-apiserver/0.log")
	appendTo(t, after, "10 in a new pod\n")
	future := time.Now().Add(time.Minute)
	must(t, os.Chtimes(after, future, future))
	f.want("10 in a new pod")
	must(t, os.RemoveAll(filepath.Join(r.opts.PodLogs, "kube-system_kube-apiserver-n1_aaaa")))
	must(t, os.Truncate(after, 0))
	appendTo(t, after, "11\n")
	f.want("11")
}

func TestLongLinesAreCut(t *testing.T) {
	r := newRig(t)
	appendTo(t, r.podLog("a_b_c/d/0.log"), strings.Repeat("x", 5*maxLine/2)+"\nshort\n")
	r.serve()
	lines, err := r.readLog(&apiv1.ReadLogRequest{Id: "a/b:d"})
	must(t, err)
	longest := 0
	for _, line := range lines {
		longest = max(longest, len(line))
	}
	if len(lines) != 4 || longest > 2*maxLine || lines[3] != "short" || len(strings.Join(lines[:3], "")) != 5*maxLine/2 {
		t.Errorf("%d lines, the longest of %d bytes", len(lines), longest)
	}
}

// A password in a log isn't for its readers.
func TestLogsHideSecrets(t *testing.T) {
	r := newRig(t).serve()
	r.opts.Logs.Logger("kubelet").Info("pulls https://me:hunter2@registry/a, token=hunter2")
	read, err := r.logs().Read(t.Context(), connect.NewRequest(&apiv1.ReadLogRequest{Id: "kubelet"}))
	must(t, err)
	for _, text := range []string{r.get(reader, "/v1/logs/kubelet").body, func() string { read.Receive(); return strings.Join(read.Msg().GetLines(), "") }()} {
		if !strings.Contains(text, "https://me:xxxxx@registry/a, token=xxxxx") || strings.Contains(text, "hunter2") {
			t.Errorf("%q, %v", text, read.Err())
		}
	}
}
