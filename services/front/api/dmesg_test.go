package api

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// TestDmesgReadsRecordByRecord stands a pipe in for the kernel's log, which also
// gives what there is and then EAGAIN.
func TestDmesgReadsRecordByRecord(t *testing.T) {
	r := newRig(t)
	r.opts.Mode = boot.Machine
	must(t, unix.Mkfifo(r.opts.Kmsg, 0o600))
	pipe, err := os.OpenFile(r.opts.Kmsg, os.O_RDWR, 0)
	must(t, err)
	defer pipe.Close()
	r.serve()
	read := func(req *apiv1.DmesgRequest) (*connect.ServerStreamForClient[apiv1.KernelMessage], func() string) {
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(20*time.Second))
		t.Cleanup(cancel)
		stream, err := r.logs().Dmesg(ctx, connect.NewRequest(req))
		must(t, err)
		return stream, func() string {
			t.Helper()
			if !stream.Receive() {
				t.Fatal(stream.Err())
			}
			return stream.Msg().GetMessage()
		}
	}
	write := func(text string) {
		t.Helper()
		_, err := pipe.WriteString("6,1,2000000,-;" + text)
		must(t, err)
	}
	write("first")
	all, next := read(&apiv1.DmesgRequest{})
	if got := next(); got != "first" {
		t.Errorf("got %q", got)
	}
	if all.Receive() || all.Err() != nil {
		t.Errorf("after the end: %v, %v", all.Msg(), all.Err())
	}
	_, next = read(&apiv1.DmesgRequest{Follow: true, Tail: -1})
	for _, text := range []string{"second", "third", "garboard.config=http://me:xxxxx@h/"} {
		write(strings.ReplaceAll(text, "xxxxx", "hunter2"))
		if got := next(); got != text {
			t.Errorf("got %q, want %q", got, text)
		}
	}
	must(t, r.stop()) // with a reader that waits
}

func TestTheTailOfDmesg(t *testing.T) {
	r := newRig(t)
	r.opts.Mode = boot.Machine
	must(t, unix.Mkfifo(r.opts.Kmsg, 0o600))
	pipe, err := os.OpenFile(r.opts.Kmsg, os.O_RDWR, 0)
	must(t, err)
	defer pipe.Close()
	// In packets, as the kernel's log is in records (pipe(7), O_DIRECT).
	_, err = unix.FcntlInt(pipe.Fd(), unix.F_SETFL, unix.O_DIRECT)
	must(t, err)
	r.serve()
	for most, want := range map[int32]string{0: "a b c", 1: "c", 2: "b c", 5: "a b c", 1 << 30: "a b c", -1: ""} {
		for _, text := range []string{"a", "b", "c"} {
			_, err := pipe.WriteString("6,1,2000000,-;" + text)
			must(t, err)
		}
		stream, err := r.logs().Dmesg(t.Context(), connect.NewRequest(&apiv1.DmesgRequest{Tail: most}))
		must(t, err)
		var got []string
		for stream.Receive() {
			got = append(got, stream.Msg().GetMessage())
		}
		if text := strings.Join(got, " "); text != want || stream.Err() != nil {
			t.Errorf("tail %d: %q, %v, want %q", most, text, stream.Err(), want)
		}
	}
}

func TestDmesgWithoutAKernelLog(t *testing.T) {
	r := newRig(t)
	r.opts.Mode = boot.Machine
	r.serve()
	stream, err := r.logs().Dmesg(t.Context(), connect.NewRequest(&apiv1.DmesgRequest{}))
	must(t, err)
	if stream.Receive() {
		t.Error("got a message")
	}
	wantCode(t, stream.Err(), connect.CodeUnavailable, "kernel's log")
}

func TestDmesgOfAContainerIsItsConsole(t *testing.T) {
	r := newRig(t)
	r.opts.Logs.Printf("begin")
	r.opts.Logs.Logger("kubelet").Error("lost: everything")
	r.serve()
	stream, err := r.logs().Dmesg(t.Context(), connect.NewRequest(&apiv1.DmesgRequest{Tail: 2}))
	must(t, err)
	var got []string
	for stream.Receive() {
		m := stream.Msg()
		got = append(got, m.GetMessage())
		if time.Since(m.GetTime().AsTime()) > time.Hour {
			t.Errorf("time %s", m.GetTime().AsTime())
		}
		if want := map[string]uint32{"begin": 6, "kubelet: lost: everything": 3}[m.GetMessage()]; m.GetLevel() != want {
			t.Errorf("level of %v", m)
		}
	}
	must(t, stream.Err())
	if diff := cmp.Diff([]string{"begin", "kubelet: lost: everything"}, got); diff != "" {
		t.Error(diff)
	}
}
