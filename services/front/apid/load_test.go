package apid

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

const (
	loadClients = 200
)

// resources answers like a node with fifty resources of a type.
func resources() http.Handler {
	answer := new(apiv1.ListResourcesResponse)
	for i := range 50 {
		answer.Items = append(answer.Items, &apiv1.Resource{Namespace: "runtime", Type: "Things.runtime.garboard.dev", Id: strconv.Itoa(i), Spec: strings.Repeat("key: value\n", 20)})
	}
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.ResourceServiceListProcedure, connect.NewUnaryHandler(garboardv1connect.ResourceServiceListProcedure,
		func(context.Context, *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
			return connect.NewResponse(answer), nil
		}))
	mux.HandleFunc(api.LogsPath, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil { // as fast as it goes
			if _, err := fmt.Fprintln(w, strings.Repeat("x", 200)); err != nil {
				return
			}
		}
	})
	return mux
}

// program is a gate in a process of its own.
type program struct {
	b   *bench
	pid int
	ca  pki.CA
}

func startProgram(t testing.TB) program {
	t.Helper()
	dir := t.TempDir()
	p := program{b: &bench{dir: filepath.Join(dir, "apid"), socket: filepath.Join(dir, "machine.sock"), address: freeport.Find(t).String()}, ca: newCA(t)}
	p.b.write(t, normal(t, p.ca))
	p.b.backend = newRecorder(t, p.b.socket, resources())
	p.b.backend.forget = true
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), gateVariable+"="+strings.Join([]string{p.b.dir, p.b.socket, p.b.address}, " "))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.pid = cmd.Process.Pid
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	eventually.That(t, 20*time.Second, "the gate to listen", func() error {
		conn, err := net.Dial("tcp", p.b.address)
		if err == nil {
			conn.Close()
		}
		return err
	})
	return p
}

// pss is the proportional set size of the gate, in bytes (proc_pid_smaps(5)).
func (p program) pss(t testing.TB) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p.pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "Pss:" {
			kib, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no Pss")
	return 0
}

// cpu is what the gate has used of the processors so far (proc_pid_stat(5)).
func (p program) cpu(t testing.TB) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		t.Fatal(err)
	}
	const tick = 10 * time.Millisecond // USER_HZ
	f := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	user, err1 := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * tick
}

// load makes calls calls by each of clients at once, and returns how long each took.
func (p program) load(t testing.TB, clients, calls int) []time.Duration {
	t.Helper()
	cert := shown(t, p.ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}})
	var mu sync.Mutex
	var took []time.Duration
	var group sync.WaitGroup
	for range clients {
		plain := p.b.client(t, cert, true)
		client := garboardv1connect.NewResourceServiceClient(plain, p.b.url(""))
		group.Go(func() {
			defer plain.CloseIdleConnections()
			var own []time.Duration
			for range calls {
				start := time.Now()
				if _, err := client.List(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: "things"})); err != nil {
					t.Error(err)
					return
				}
				own = append(own, time.Since(start))
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, own[1:]...) // the first one is a TLS handshake too
		})
	}
	group.Wait()
	slices.Sort(took)
	return took
}

func mb(n int) float64 { return float64(n) / 1e6 }

// A hundred clients a second, each with one call, are what a person's scripts make.
func BenchmarkHandshakes(b *testing.B) {
	p := startProgram(b)
	cert := admin(b, p.ca)
	for b.Loop() {
		client := garboardv1connect.NewResourceServiceClient(p.b.client(b, cert, true), p.b.url(""))
		if _, err := client.List(b.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: "things"})); err != nil {
			b.Fatal(err)
		}
	}
}
